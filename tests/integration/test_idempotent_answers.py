"""What is stored of an answer, to whom it is repeated, and which forms are the same request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.mixins import PermissionRequiredMixin
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import Http404, HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.exceptions import NotAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView

from django_dlock import idempotent_view
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    with local_locks():
        yield


def as_sent(value: Any) -> Any:
    """A value of a form: bytes are a file of this name and content."""
    if isinstance(value, list):
        return [as_sent(one) for one in value]
    return SimpleUploadedFile("b", value) if isinstance(value, bytes) else value


def post(data: Any = None, key: str = "k1", **headers: str) -> HttpRequest:
    given = {"accept": "application/json", "idempotency-key": key, **headers}
    fields = {name: as_sent(value) for name, value in (data or {}).items()}
    request = RequestFactory().post("/pay/7/", fields, headers=given)
    request.user = User(pk=1)
    return request


def login(request: HttpRequest, number: int = 7) -> HttpResponse:
    response = HttpResponse("paid", status=201)
    response.set_cookie("sessionid", "secret-of-the-session", httponly=True)
    return response


def plain(view: Any = login, **options: Any) -> Any:
    return idempotent_view(**options)(view)


def as_async(view: Any = login, **options: Any) -> Any:
    async def aview(request: HttpRequest, number: int = 7) -> HttpResponse:
        response: HttpResponse = await sync_to_async(view)(request, number)
        return response

    guarded = idempotent_view(**options)(aview)
    return lambda *args, **kwargs: asyncio.run(guarded(*args, **kwargs))


def as_class(view: Any = login, **options: Any) -> Any:
    class Pay(View):
        def post(self, request: HttpRequest, number: int = 7) -> HttpResponse:
            response: HttpResponse = view(request, number)
            return response

    return idempotent_view(**options)(Pay).as_view()


def as_rest(view: Any = login, **options: Any) -> Any:
    class Pay(APIView):
        authentication_classes = ()
        permission_classes = ()

        @method_decorator(idempotent_view(client="all", **options))
        def post(self, request: Any, number: int = 7) -> HttpResponse:
            response: HttpResponse = view(request, number)
            return response

    return Pay.as_view()


KINDS = {"sync": plain, "async": as_async, "class": as_class, "REST framework": as_rest}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


# -- cookies -------------------------------------------------------------------------------


@each_kind
def test_cookies_are_neither_stored_nor_repeated(make: Any) -> None:
    view = make()
    assert view(post()).cookies["sessionid"].value == "secret-of-the-session"
    assert "secret-of" not in (IdempotencyRecord.objects.get().result or "")
    second = view(post())
    assert (second.status_code, second["Idempotent-Replayed"]) == (201, "true")
    assert not second.cookies


@each_kind
def test_cookies_are_stored_and_repeated_if_the_view_asks_for_it(make: Any) -> None:
    view = make(store_cookies=True)
    first, second = view(post()), view(post())
    assert second["Idempotent-Replayed"] == "true"
    assert second.cookies.output() == first.cookies.output() != ""


def test_a_cookie_is_repeated_with_every_attribute_that_it_had() -> None:
    """Also with those that the parser of Python does not read back, such as a path with a space."""

    def with_cookies(request: HttpRequest) -> HttpResponse:
        response = HttpResponse("paid")
        response.set_cookie("basket", 'a "b"; c', path="/my shop/ü", httponly=True, max_age=60)
        response.set_cookie("where", "x", domain="shop.example", secure=True, samesite="None")
        response.set_signed_cookie(
            "signed", "x", path="/a;b", expires="Thu, 01 Jan 2099 00:00:00 GMT"
        )
        response.delete_cookie("old")
        return response

    view = plain(with_cookies, store_cookies=True)
    first, second = view(post()), view(post())
    assert second["Idempotent-Replayed"] == "true"
    assert second.cookies.output() == first.cookies.output()
    assert second.cookies["basket"].value == 'a "b"; c'
    assert len(second.cookies) == 4


def test_a_cookie_that_an_earlier_version_has_stored_is_set_again() -> None:
    view = plain(store_cookies=True)
    first = view(post())
    record = IdempotencyRecord.objects.get()
    answer = json.loads(record.result or "")
    answer["cookies"] = [morsel.OutputString() for morsel in first.cookies.values()]
    IdempotencyRecord.objects.update(result=json.dumps(answer))
    assert view(post()).cookies.output() == first.cookies.output()


def test_a_cookie_that_is_set_as_a_header_is_not_stored() -> None:
    def with_header(request: HttpRequest) -> HttpResponse:
        return HttpResponse("paid", headers={"set-cookie": "sessionid=secret-of-it"})

    view = plain(with_header)
    assert view(post())["Set-Cookie"] == "sessionid=secret-of-it"
    assert "secret-of" not in (IdempotencyRecord.objects.get().result or "")
    assert "Set-Cookie" not in view(post())


def test_cookies_of_a_record_of_another_time_are_not_repeated() -> None:
    """An earlier version has stored them, or the view asked for it then."""
    plain(store_cookies=True)(post())
    record = IdempotencyRecord.objects.get()
    stored = json.loads(record.result or "")
    stored["headers"].append(["Set-Cookie", "sessionid=secret-of-it"])
    IdempotencyRecord.objects.update(result=json.dumps(stored))
    second = plain()(post())
    assert second["Idempotent-Replayed"] == "true"
    assert not second.cookies
    assert "Set-Cookie" not in second


# -- replay_if -----------------------------------------------------------------------------


class Gate:
    """Answers what it is told, and counts how often it was asked."""

    def __init__(self, answer: Any = True) -> None:
        self.answer, self.asked = answer, 0

    def __call__(self, request: Any, number: int) -> Any:
        self.asked += 1
        assert (request.method, number) == ("POST", 7)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@each_kind
def test_a_replay_is_asked_for_each_time_and_a_first_run_is_not(make: Any) -> None:
    gate = Gate()
    view = make(replay_if=gate)
    assert view(post(), number=7).status_code == 201
    assert gate.asked == 0
    assert view(post(), number=7)["Idempotent-Replayed"] == "true"
    gate.answer = False
    refused = view(post(), number=7)
    assert (refused.status_code, refused["Content-Type"]) == (403, "application/problem+json")
    assert "Idempotent-Replayed" not in refused
    assert b"paid" not in refused.content
    assert gate.asked == 2


def test_a_refused_replay_is_a_page_for_a_client_that_prefers_html() -> None:
    view = plain(replay_if=lambda request, **_: None)
    view(post())
    refused = view(post(accept="text/html"))
    assert (refused.status_code, refused["Content-Type"]) == (403, "text/html; charset=utf-8")


@each_kind
def test_replay_if_may_return_the_refusal_itself(make: Any) -> None:
    refusal = (Response if make is as_rest else HttpResponse)("gone", status=410)
    view = make(replay_if=Gate(refusal))
    view(post(), number=7)
    assert view(post(), number=7).status_code == 410


@pytest.mark.parametrize("error", [PermissionDenied, Http404], ids=["403", "404"])
@pytest.mark.parametrize("make", [plain, as_async, as_class], ids=["sync", "async", "class"])
def test_an_exception_of_replay_if_is_djangos(make: Any, error: type[Exception]) -> None:
    view = make(replay_if=Gate(error()))
    view(post(), number=7)
    with pytest.raises(error):
        view(post(), number=7)
    # The lock is free again, and the answer is still there.
    assert make(replay_if=None)(post(), number=7)["Idempotent-Replayed"] == "true"
    with pytest.raises(error):
        view(post(), number=7)


@pytest.mark.parametrize(
    ("error", "status"), [(PermissionDenied(), 403), (Http404(), 404), (NotAuthenticated(), 403)]
)
def test_an_exception_of_replay_if_is_rest_frameworks(error: Exception, status: int) -> None:
    view = as_rest(replay_if=Gate(error))
    view(post(), number=7)
    assert view(post(), number=7).status_code == status


def test_replay_if_of_an_asynchronous_view_may_be_a_coroutine_function() -> None:
    async def never(request: HttpRequest, number: int) -> bool:
        await asyncio.sleep(0)
        return False

    view = as_async(replay_if=never)
    assert view(post(), number=7).status_code == 201
    assert view(post(), number=7).status_code == 403


def test_a_coroutine_function_is_refused_for_a_synchronous_view() -> None:
    """Its coroutine would be true."""

    async def never(request: HttpRequest) -> bool:
        return False

    with pytest.raises(TypeError, match=r"replay_if of @idempotent_view on .*login.* coroutine"):
        plain(replay_if=never)

    def seems_plain(request: HttpRequest) -> Any:
        return never(request)

    view = plain(replay_if=seems_plain)
    view(post())
    with pytest.raises(TypeError, match=r"replay_if .* returned a coroutine"):
        view(post())


@pytest.mark.parametrize("wrong", [True, "owner", 5])
def test_replay_if_is_a_callable(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"replay_if is .*; it takes a callable"):
        plain(replay_if=wrong)


# -- forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": ["1", "b", "2"]}, {"a": "1", "b": "2"}),
        ({"a": ["1", "2"], "b": "3"}, {"a": "1", "2": "b", "b": "3"}),
        ({"a": ["1", "2"]}, {"a": ["12"]}),
        ({"a": ["1", ""]}, {"a": "1"}),
        ({"a": ["1", "2"]}, {"a": ["2", "1"]}),
        (
            {"A": "q", "a": b"c", "d": b"f"},
            {"A": "q", "a": "b", "c": "d", "b": "f"},
        ),
        ({"a": b"c", "d": [b"1", b"2"]}, {"a": [b"c", b"1"], "d": b"2"}),
        ({"a": [b"1", b"2"]}, {"a": [b"12"]}),
    ],
    ids=["values", "name", "joined", "empty", "order", "file", "fields of files", "files"],
)
def test_g14_forms_with_other_fields_are_other_requests(one: Any, other: Any) -> None:
    view = plain()
    assert view(post(one)).status_code == 201
    assert view(post(one)).status_code == 201
    assert view(post(other)).status_code == 422
    assert view(post(other, key="k2")).status_code == 201
    assert view(post(one, key="k2")).status_code == 422


def test_a_form_with_one_value_a_field_has_the_fingerprint_of_earlier_versions() -> None:
    """So that records which an earlier version has stored are still compared."""
    import hashlib

    made = hashlib.sha256()
    for part in (b"POST", b"/pay/7/", b"a", b"1", b"b", b"2"):
        made.update(len(part).to_bytes(8, "big") + part)
    from django_dlock.views.stored import fingerprint

    assert fingerprint(post({"b": "2", "a": "1"})) == made.hexdigest()


def test_checks_of_a_class_are_made_before_a_decorated_method() -> None:
    """As the guide says; on the class, the decorator would stand above the mixin."""

    class Pay(PermissionRequiredMixin, View):
        permission_required = "shop.add_effect"
        raise_exception = True
        allowed = True

        def has_permission(self) -> bool:
            return type(self).allowed

        @method_decorator(idempotent_view)
        def post(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse("paid", status=201)

    assert Pay.as_view()(post()).status_code == 201
    assert Pay.as_view()(post())["Idempotent-Replayed"] == "true"
    Pay.allowed = False
    with pytest.raises(PermissionDenied):
        Pay.as_view()(post())
