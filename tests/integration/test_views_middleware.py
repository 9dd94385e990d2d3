"""Guarded views behind Django's middleware, with the real handler: what is sent and stored."""

from __future__ import annotations

import asyncio
import gzip
import inspect
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_POST
from django.views.generic import TemplateView
from ninja import NinjaAPI
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.schemas.generators import EndpointEnumerator
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_dlock import Lock, idempotent_view, locked_view, locks
from django_dlock.models import IdempotencyRecord
from django_dlock.testing import local_locks
from testproject.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

guard = idempotent_view(client="all")


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    seen.clear()
    with local_locks():
        yield
        assert locks["default"].list() == []


class Site:
    """Serves one view; ``middleware`` are names in this module, or Django's."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def __call__(self, view: Any, *middleware: str) -> Client:
        self.settings.ROOT_URLCONF = ModuleType("urls_of_a_test")
        self.settings.ROOT_URLCONF.urlpatterns = [path("", view)]
        self.settings.MIDDLEWARE = [
            name if "." in name else f"{__name__}.{name}" for name in middleware
        ]
        return Client(raise_request_exception=False)


@pytest.fixture
def site(settings: Any) -> Site:
    return Site(settings)


def post(client: Client, data: Any = None, key: str = "k1", **extra: Any) -> Any:
    headers = {"idempotency-key": key, "accept": "application/json", **extra}
    return client.post("/", data or {}, headers=headers)


def charge(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(order_number=1, by="view")
    return JsonResponse({"charge": Effect.objects.count()}, status=201)


# -- pages, which a middleware may change before they are rendered --------------------------------


seen: list[Any] = []
"""What the middleware and the templates have met."""


class Changes:
    """Gives each page a value that its view does not know, as for a menu or an experiment."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_template_response(self, request: HttpRequest, response: Any) -> Any:
        seen.append(("rendered" if response.is_rendered else "unrendered", states()))
        if hasattr(response, "data"):
            response.data = {**response.data, "menu": "menu"}
        else:
            response.context_data = {**response.context_data, "menu": "menu"}
        return response


def states() -> list[str]:
    return list(IdempotencyRecord.objects.values_list("state", flat=True))


def page(request: HttpRequest) -> TemplateResponse:
    Effect.objects.create(order_number=1, by="view")
    template = engines["django"].from_string("{{ menu }} {{ seen }} {{ count }}")
    return TemplateResponse(
        request, template, {"count": Effect.objects.count(), "seen": in_template}
    )


def in_template() -> str:
    """While the page is rendered: is the run recorded, and the lock held?"""
    seen.append((states(), len(locks["default"].list())))
    return "seen"


async def async_page(request: HttpRequest) -> TemplateResponse:
    return await sync_to_async(page)(request)


class Api(APIView):
    def post(self, request: Any) -> Response:
        Effect.objects.create(order_number=1, by="view")
        return Response({"count": Effect.objects.count()})


class Method(Api):
    post = method_decorator(guard)(Api.post)


PAGES = {
    "Django": (guard(page), b"menu seen 1"),
    "Django, async": (guard(async_page), b"menu seen 1"),
    "method of REST framework": (Method.as_view(), b'{"count":1,"menu":"menu"}'),
    "around REST framework": (guard(Api.as_view()), b'{"count":1,"menu":"menu"}'),
}


@pytest.mark.parametrize("kind", PAGES)
def test_g12_the_stored_page_is_the_one_that_was_sent(site: Site, kind: str) -> None:
    view, content = PAGES[kind]
    client = site(view, "Changes")
    first, again = post(client), post(client)
    assert [answer.content for answer in (first, again)] == [content] * 2
    assert first["Content-Type"] == again["Content-Type"]
    assert ("Idempotent-Replayed" in first, again["Idempotent-Replayed"]) == (False, "true")
    # The effect and its record are committed before; the lock is held until the page is stored.
    assert seen[0] == ("unrendered", ["succeeded"])
    assert seen[1:] in ([], [(["succeeded"], 1)])
    assert Effect.objects.count() == 1


def test_the_page_is_stored_under_asgi_too(site: Site) -> None:
    site(guard(async_page), "Changes")
    headers = {"idempotency-key": "k1", "accept": "application/json"}

    async def both() -> list[bytes]:
        client = AsyncClient()
        return [(await client.post("/", headers=headers)).content for _ in range(2)]

    assert asyncio.run(both()) == [b"menu seen 1"] * 2
    assert Effect.objects.count() == 1


def test_without_such_a_middleware_an_error_of_the_template_rolls_back(site: Site) -> None:
    errors = [ValueError("broken")]

    def broken(request: HttpRequest) -> TemplateResponse:
        response = page(request)
        response.context_data = {"menu": lambda: raise_(errors)}
        return response

    client = site(guard(broken))
    assert post(client).status_code == 500
    assert Effect.objects.count() == 0
    assert post(client).status_code == 200
    assert Effect.objects.count() == 1


def raise_(errors: list[Exception]) -> None:
    if errors:
        raise errors.pop()


def test_g12_a_page_that_cannot_be_rendered_does_not_run_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a middleware may still change it, it is rendered after the commit, as without us."""

    def broken(request: HttpRequest) -> TemplateResponse:
        response = page(request)
        response.context_data = {"count": lambda: raise_([ValueError("broken")])}
        return response

    client = site(guard(broken), "Changes")
    assert [post(client).status_code for _ in range(2)] == [500, 409]
    assert "the page was not rendered" in caplog.text
    assert Effect.objects.count() == 1


def test_a_page_too_large_to_store_is_sent_and_does_not_run_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def large(request: HttpRequest) -> TemplateResponse:
        response = page(request)
        response.context_data = {"count": "x" * 1_000_001}
        return response

    client = site(guard(large), "Changes")
    first = post(client)
    assert (first.status_code, len(first.content) > 1_000_000) == (200, True)
    assert "1000007 bytes" in caplog.text
    assert post(client).status_code == 409
    assert Effect.objects.count() == 1


def test_the_middleware_sees_a_page_of_locked_view_unrendered(site: Site) -> None:
    client = site(locked_view("pages")(page), "Changes")
    assert post(client).content == b"menu seen 1"
    assert seen[0] == ("unrendered", [])


# -- uploads: who sets the handlers, and when ------------------------------------------------------


class Progress(MemoryFileUploadHandler):
    """A handler of the project's own, such as one that shows progress or scans for viruses."""

    def new_file(self, *args: Any, **kwargs: Any) -> None:
        seen.append("own handler")
        super().new_file(*args, **kwargs)


class SetsHandlers:
    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_view(self, request: HttpRequest, *args: Any) -> None:
        request.upload_handlers = [Progress(request)]


def upload(request: HttpRequest) -> HttpResponse:
    Effect.objects.create(order_number=1, by="view")
    return HttpResponse(request.FILES["file"].read())


def sets_handlers(view: Any, how: str = "assigned") -> Any:
    """As Django's own guide does it, above ``csrf_protect``, which reads the form."""

    @csrf_exempt
    def with_handlers(request: HttpRequest) -> Any:
        if how == "assigned":
            request.upload_handlers = [Progress(request)]
        else:
            request.upload_handlers.insert(0, Progress(request))
        return view(request)

    return with_handlers


def send(client: Client) -> Any:
    return post(client, {"file": SimpleUploadedFile("receipt.txt", b"receipt")})


@pytest.mark.parametrize("decorator", [guard, locked_view("uploads"), lambda view: view])
@pytest.mark.parametrize("how", ["assigned", "inserted"])
def test_a_view_above_may_set_upload_handlers(site: Site, decorator: Any, how: str) -> None:
    client = site(sets_handlers(decorator(csrf_protect(upload)), how))
    assert send(client).content == b"receipt"
    assert seen == ["own handler"]


@pytest.mark.parametrize("decorator", [guard, locked_view("uploads")])
def test_a_middleware_may_set_upload_handlers(site: Site, decorator: Any) -> None:
    client = site(decorator(upload), "SetsHandlers")
    assert send(client).content == b"receipt"
    assert seen == ["own handler"]


def test_a_view_below_locked_view_may_set_upload_handlers(site: Site) -> None:
    assert send(site(locked_view("uploads")(sets_handlers(upload)))).content == b"receipt"
    assert seen == ["own handler"]


async def async_upload(request: HttpRequest) -> HttpResponse:
    request.upload_handlers = [Progress(request)]
    return await sync_to_async(upload)(request)


@pytest.mark.parametrize(
    "view", [sets_handlers(upload), sets_handlers(upload, "inserted"), async_upload]
)
def test_below_idempotent_view_the_error_says_where_to_set_them(site: Site, view: Any) -> None:
    client = site(guard(view))
    client.raise_request_exception = True
    with pytest.raises(AttributeError, match="above @idempotent_view"):
        send(client)
    assert Effect.objects.count() == 0


# -- what changes an answer after the view ---------------------------------------------------------


def test_a_repeated_answer_is_compressed_for_each_client_anew(site: Site) -> None:
    def long(request: HttpRequest) -> HttpResponse:
        charge(request)
        return HttpResponse(b"paid " * 100)

    client = site(guard(long), "django.middleware.gzip.GZipMiddleware")
    packed = post(client, **{"accept-encoding": "gzip"})
    plain, again = post(client), post(client, **{"accept-encoding": "gzip"})
    assert plain.content == gzip.decompress(again.content) == gzip.decompress(packed.content)
    assert [answer.get("Content-Encoding") for answer in (packed, plain, again)] == [
        *("gzip", None, "gzip")
    ]
    assert Effect.objects.count() == 1


CACHE = (
    "django.middleware.cache.UpdateCacheMiddleware",
    "django.middleware.http.ConditionalGetMiddleware",
    "django.middleware.cache.FetchFromCacheMiddleware",
)


def test_no_cache_and_no_etag_hides_a_refusal(site: Site, settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    view = locked_view("cached", status=423)(lambda request: HttpResponse("free"))
    client = site(view, *CACHE)
    with Lock("cached", bound=False):
        refused = client.get("/")
    free = client.get("/")
    assert [answer.status_code for answer in (refused, free)] == [423, 200]
    assert "ETag" in free
    assert client.get("/", headers={"if-none-match": free["ETag"]}).status_code == 304
    with Lock("cached", bound=False):
        # A cached answer needs no lock.
        assert client.get("/").content == b"free"


def test_post_requests_are_repeated_by_their_key_behind_a_cache(site: Site, settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    client = site(
        guard(charge), CACHE[0], "django.middleware.http.ConditionalGetMiddleware", CACHE[1]
    )
    answers = [post(client, key=key) for key in ("k1", "k1", "k2")]
    assert [answer.json()["charge"] for answer in answers] == [1, 1, 2]


# -- what Django and frameworks read from a view --------------------------------------------------


# In a project that uses it, decorated functions show the types of their parameters.
assert NinjaAPI


class Orders(ViewSet):
    """The orders."""

    def create(self, request: Any) -> Response:
        return Response()


@pytest.mark.parametrize("decorator", [locked_view("all"), guard])
def test_views_keep_what_others_read_from_them(decorator: Any) -> None:
    made = Orders.as_view({"post": "create"}, suffix="List")
    guarded = decorator(made)
    for name in ("cls", "actions", "initkwargs", "csrf_exempt", "__name__", "__doc__"):
        assert getattr(guarded, name) == getattr(made, name)
    page = decorator(TemplateView.as_view(template_name="it.html"))
    assert (page.view_class, page.view_initkwargs) == (TemplateView, {"template_name": "it.html"})
    function = decorator(csrf_exempt(charge))
    assert function.csrf_exempt
    assert (function.__name__, function.__module__) == ("charge", __name__)
    bare, shown = (inspect.signature(it, eval_str=True) for it in (charge, function))
    assert bare == shown


@pytest.mark.parametrize("decorator", [locked_view("all"), guard])
def test_generators_of_schemas_find_guarded_views(decorator: Any) -> None:
    """As those of REST framework and drf-spectacular do, by class and actions of each URL."""
    urls = [
        path("orders/", decorator(Orders.as_view({"post": "create"}))),
        path("method/", decorator(Method.as_view())),
        path("function/", decorator(api_view(["POST"])(lambda request: Response()))),
    ]
    found = EndpointEnumerator(patterns=urls).get_api_endpoints()
    assert sorted((where, method, view.cls.__name__) for where, method, view in found) == [
        ("/function/", "POST", urls[2].callback.cls.__name__),
        ("/method/", "POST", "Method"),
        ("/orders/", "POST", "Orders"),
    ]


@pytest.mark.parametrize("decorator", [locked_view("all"), guard])
def test_a_page_for_everybody_needs_no_login(site: Site, decorator: Any) -> None:
    names = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.auth.middleware.LoginRequiredMiddleware",
    ]

    @login_not_required
    def public(request: HttpRequest) -> HttpResponse:
        return charge(request)

    assert post(site(decorator(public), *names)).status_code == 201
    assert post(site(decorator(charge), *names)).status_code == 302


@pytest.mark.parametrize("decorator", [locked_view("all"), guard])
def test_the_csrf_token_is_asked_for_unless_the_view_is_exempt(site: Site, decorator: Any) -> None:
    keys = itertools.count()

    def status(view: Any) -> int:
        client = site(view, "django.middleware.csrf.CsrfViewMiddleware")
        client.handler.enforce_csrf_checks = True
        status: int = post(client, key=f"k{next(keys)}").status_code
        return status

    assert status(decorator(charge)) == 403
    assert status(decorator(csrf_exempt(charge))) == status(csrf_exempt(decorator(charge))) == 201
    assert status(csrf_exempt(decorator(csrf_protect(charge)))) == 403
    assert status(decorator(csrf_exempt(require_POST(charge)))) == 201
