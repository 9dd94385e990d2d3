"""Requests that visitors choose: no error of ours, no text unescaped, no two that collide."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.test.client import MULTIPART_CONTENT, encode_multipart
from django.urls import path
from hypothesis import assume, example, given
from hypothesis import strategies as some
from rest_framework.decorators import api_view, authentication_classes, renderer_classes
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response

from django_dlock import Lock, idempotent_view, locked_view
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks
from django_dlock.views import stored
from testproject.shop.models import Effect
from tests.support.fuzzing import examples, texts

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

MARK = "<script>\"'&"


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks(), override_settings(MIDDLEWARE=[], ALLOWED_HOSTS=["*"]):
        yield


def effect(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(order_number=1, by="view")
    return JsonResponse({"number": Effect.objects.count()}, status=201)


@locked_view("order:{slug}", methods="unsafe")
def locked(request: HttpRequest, slug: str) -> HttpResponse:
    return effect(request)


@locked_view(["slug"])
async def alocked(request: HttpRequest, slug: str) -> HttpResponse:
    return HttpResponse("done")


@locked_view("taken")
def contended(request: HttpRequest, slug: str) -> HttpResponse:
    raise AssertionError("the lock is held")


@locked_view("taken")
async def acontended(request: HttpRequest, slug: str) -> HttpResponse:
    raise AssertionError("the lock is held")


@idempotent_view(client="{slug}", store_cookies=True)
def paid(request: HttpRequest, slug: str) -> HttpResponse:
    return effect(request)


@idempotent_view(client=lambda request, slug: slug)
async def apaid(request: HttpRequest, slug: str) -> HttpResponse:
    return HttpResponse("done", status=201)


@api_view(["POST", "PUT", "PATCH"])
@authentication_classes([])
# The page for browsers needs an app that the settings do not install.
@renderer_classes([JSONRenderer])
@idempotent_view(client="{slug}")
def rest_paid(request: Any, slug: str) -> Response:
    effect(request)
    return Response({"slug": slug}, status=201)


VIEWS = {view.__name__: view for view in (locked, alocked, contended, acontended, paid, apaid)}
VIEWS["rest_paid"] = rest_paid
urlpatterns = [path(f"{name}/<path:slug>", view) for name, view in VIEWS.items()]

as_bytes = some.binary(max_size=20) | some.text(max_size=20).map(str.encode)
paths = as_bytes.filter(bool).map(quote) | texts(40).map(lambda text: quote(text, errors="replace"))
# Servers refuse line feeds in headers before Django sees them.
headers = some.text(some.characters(min_codepoint=32, max_codepoint=255), max_size=40)
keys = some.one_of(
    headers,
    some.sampled_from(
        ["k", '"k"', "", '""', '"', "k" * 200, "k" * 201, '"a"b"', "k\x7f", "é", "a,b"]
    ),
)
accepts = some.one_of(
    headers,
    some.sampled_from(
        [
            *("", "*/*", "text/html", "application/json", "application/problem+json;q=0.1"),
            *("text/html;q=nan", "text/html;q=", ";;;", "a/b/c", "/", "application/json;q=1e999"),
            *("text/*;q=0, application/json", "," * 50, 'text/html;a="', "*/html"),
        ]
    ),
)
types = some.one_of(
    headers,
    some.sampled_from(
        [
            *(
                "application/json",
                "text/plain; charset=nothing",
                "application/x-www-form-urlencoded",
            ),
            *("multipart/form-data", "multipart/form-data; boundary=", MULTIPART_CONTENT),
            *("multipart/form-data; boundary=é", "multipart/mixed; boundary=x", "a;b=c;;"),
            *(
                "application/x-www-form-urlencoded; charset=utf-7",
                "multipart/form-data; boundary=x",
            ),
        ]
    ),
)
PART = b"--x\r\nContent-Disposition: form-data"
bodies = some.one_of(
    some.binary(max_size=60),
    some.sampled_from(
        [
            b"",
            b"a=1&b=2",
            b"&".join(b"a%d=1" % number for number in range(1_100)),
            b"%ff=%00&%F0",
            b"[" * 10_000,
            PART + b"; name=a\r\n\r\n1\r\n--x--\r\n",
            PART + b'; name="a"; filename="../b"\r\n\r\n1\r\n--x--\r\n',
            PART + b"\r\n\r\n",
            PART + b"; name=a\r\nContent-Transfer-Encoding: base64\r\n\r\n!\r\n--x--\r\n",
            b"".join(PART + b"; name=a%d\r\n\r\n1\r\n" % number for number in range(1_100)),
        ]
    ),
)
methods = some.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "FOO", "post", "HEAD"])
asked = some.fixed_dictionaries(
    {
        "view": some.sampled_from(sorted(VIEWS)),
        "path": paths,
        "query": as_bytes.map(quote) | headers,
        "method": methods,
        "body": bodies,
        "type": types,
        "key": some.none() | keys,
        "accept": some.none() | accepts,
        "cookie": some.none() | headers,
    }
)
USUAL = {
    "view": "paid",
    "path": "x",
    "query": "",
    "method": "POST",
    "body": b"{}",
    "key": "k",
    "type": "application/json",
    "accept": None,
    "cookie": None,
}


def ask(facts: dict[str, Any], *, over: str = "wsgi") -> HttpResponse:
    meta = {
        name: value
        for name, value in {
            "HTTP_IDEMPOTENCY_KEY": facts["key"],
            "HTTP_ACCEPT": facts["accept"],
            "HTTP_COOKIE": facts["cookie"],
        }.items()
        if value is not None
    }
    address = f"/{facts['view']}/{facts['path']}"
    how = (facts["method"], address, facts["body"], facts["type"])
    if over == "wsgi":
        client = Client(raise_request_exception=True)
        found: HttpResponse = client.generic(*how, QUERY_STRING=facts["query"], **meta)
        return found
    named = {name.removeprefix("HTTP_").replace("_", "-"): value for name, value in meta.items()}
    aclient = AsyncClient(raise_request_exception=True)
    return asyncio.run(aclient.generic(*how, query_string=facts["query"], headers=named))


def same(one: HttpResponse, other: HttpResponse) -> bool:
    return (one.status_code, one.content) == (other.status_code, other.content)


@examples(60)
@given(asked, some.sampled_from(["wsgi", "asgi"]))
@example({**USUAL, "path": "%00%1b%0A%E2%80%AE"}, "wsgi")
@example({**USUAL, "path": quote(MARK)}, "wsgi")
@example({**USUAL, "path": "%ff"}, "wsgi")
@example({**USUAL, "view": "contended", "path": quote(MARK), "accept": "text/html"}, "wsgi")
@example({**USUAL, "view": "acontended", "path": quote(MARK), "accept": "text/html"}, "asgi")
@example({**USUAL, "view": "contended", "path": quote(MARK), "accept": "text/html;q=nan"}, "wsgi")
@example({**USUAL, "view": "locked", "method": "FOO", "path": "x" * 3_000}, "wsgi")
@example({**USUAL, "type": "multipart/form-data"}, "wsgi")
@example({**USUAL, "type": "multipart/form-data; boundary=é"}, "wsgi")
@example({**USUAL, "type": "multipart/form-data; boundary=x", "body": b"--x\r\n"}, "asgi")
@example({**USUAL, "body": b"a" * 2_700_000}, "wsgi")
@example({**USUAL, "key": '"a"b"'}, "wsgi")
def test_any_request_is_answered_and_its_repetition_is_the_same(
    facts: dict[str, Any], over: str
) -> None:
    # Django's client for ASGI cannot send others.
    assume(over == "wsgi" or facts["type"].isascii())
    IdempotencyRecord.objects.all().delete()
    Effect.objects.all().delete()
    with Lock("taken", bound=False):
        first = ask(facts, over=over)
        count = Effect.objects.count()
        second = ask(facts, over=over)
    for response in (first, second):
        assert response.status_code < 500
        for name, value in response.items():
            assert not set("\r\n\0") & set(name + value)
        shown = response.content.decode()
        if response["Content-Type"].startswith("text/html") and response.status_code == 409:
            assert MARK not in shown
        if response["Content-Type"] == "application/problem+json":
            problem = json.loads(shown)
            assert problem["status"] == response.status_code
            assert shown.isascii()
    if "Idempotent-Replayed" in second:
        assert same(first, second)
        assert Effect.objects.count() == count <= 1
    else:
        assert second.status_code == first.status_code


def multipart(fields: list[tuple[str, str]], files: list[tuple[str, str, bytes]]) -> HttpRequest:
    lines: list[bytes] = []
    for name, value in fields:
        lines += [b"--b", f'Content-Disposition: form-data; name="{name}"'.encode(), b""]
        lines.append(value.encode())
    for name, filename, content in files:
        disposition = f'Content-Disposition: form-data; name="{name}"; filename="{filename}"'
        lines += [b"--b", disposition.encode(), b"Content-Type: text/plain", b"", content]
    body = b"\r\n".join([*lines, b"--b--", b""])
    return RequestFactory().generic("POST", "/", body, "multipart/form-data; boundary=b")


letters = some.text(some.sampled_from("ab12=&/;%\u00e9 "), min_size=1, max_size=3)
forms = some.tuples(
    some.lists(some.tuples(letters, letters), max_size=4),
    some.lists(some.tuples(letters, letters, some.binary(max_size=3)), max_size=2),
)


def meaning(request: HttpRequest) -> Any:
    """What Django makes of a form; the order of fields, though not of their values, is nothing."""
    files = request.FILES.lists()
    return (
        sorted(request.POST.lists()),
        sorted((name, [(file.name, file.read()) for file in found]) for name, found in files),
    )


@examples(150)
@given(forms, forms)
@example(([("a", "1"), ("a", "b"), ("a", "2")], []), ([("a", "1"), ("b", "2")], []))
@example(([("a", "1"), ("a", "2")], []), ([("a", "2"), ("a", "1")], []))
@example(([("a", "1")], []), ([], [("a", "1", b"")]))
@example(([], [("a", "x", b"1"), ("a", "y", b"2")]), ([], [("a", "y", b"2"), ("a", "x", b"1")]))
@example(([("a", "1"), ("b", "2")], []), ([("b", "2"), ("a", "1")], []))
def test_two_forms_have_one_fingerprint_only_if_they_mean_the_same(one: Any, other: Any) -> None:
    made = [stored.fingerprint(multipart(*form)) for form in (one, other)]
    meant = [meaning(multipart(*form)) for form in (one, other)]
    assert (made[0] == made[1]) == (meant[0] == meant[1])


@examples(100)
@given(some.tuples(methods, paths, as_bytes), some.tuples(methods, paths, as_bytes))
@example(("POST", "a", b"b"), ("POST", "ab", b""))
@example(("POST", "a?b", b""), ("POST", "a%3Fb", b""))
def test_two_requests_have_one_fingerprint_only_if_they_are_the_same(one: Any, other: Any) -> None:
    def asked_for(method: str, address: str, body: bytes) -> Any:
        request = RequestFactory().generic(method, f"/{address}", body, "text/plain")
        return (request.method, request.get_full_path(), request.body), stored.fingerprint(request)

    (first, made), (second, other_made) = asked_for(*one), asked_for(*other)
    assert (made == other_made) == (first == second)


@examples(60)
@given(texts(40, at_least=1), texts(40, at_least=1), keys, keys)
@example("a", "a/b", "b/k", "k")
@example("a%2F", "a/", "k", "k")
@example("a\n", "a?", "k", "k")
def test_a_client_never_gets_the_answer_of_another(
    one: str, other: str, key: str, other_key: str
) -> None:
    """Whatever the names of the clients, and of their keys."""
    IdempotencyRecord.objects.all().delete()
    whose: list[str] = []

    @idempotent_view(client=lambda request: whose[-1], idempotency_scope="fuzz")
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(whose[-1].encode("utf-8", "surrogatepass"))

    for name, header in ((one, key), (other, other_key), (one, key)):
        whose.append(name)
        request = RequestFactory().post("/", b"", "text/plain", HTTP_IDEMPOTENCY_KEY=header)
        response = view(request)
        assert response.status_code in (200, 400)
        if response.status_code == 200:
            assert response.content == name.encode("utf-8", "surrogatepass")


@examples(60)
@given(paths, some.booleans())
def test_any_path_can_be_the_name_of_a_lock(address: str, anonymous: bool) -> None:
    seen: list[str] = []

    @locked_view(lambda request, slug: seen.append(slug) or slug)
    def view(request: HttpRequest, slug: str) -> HttpResponse:
        return HttpResponse(html.escape(slug))

    request = RequestFactory().post(f"/{address}")
    request.user = AnonymousUser() if anonymous else User(pk=1)
    assume(len(request.path) > 1)
    response = view(request, slug=request.path[1:])
    assert response.status_code == 200
    assert seen == [request.path[1:]]


def test_an_upload_is_compared_by_its_content() -> None:
    made = set()
    for content in (b"1", b"2"):
        body = encode_multipart("b", {"file": SimpleUploadedFile("a", content)})
        request = RequestFactory().generic("POST", "/", body, "multipart/form-data; boundary=b")
        made.add(stored.fingerprint(request))
    assert len(made) == 2
    assert re.fullmatch("[0-9a-f]{64}", made.pop())
