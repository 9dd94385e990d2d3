"""Where the two decorators may stand in each framework: views to try, and what is expected.

``docs/reference/frameworks.md`` shows these as a table; ``test_frameworks.py`` tries each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from ninja import NinjaAPI, Router, Schema, Status
from ninja.decorators import decorate_view
from ninja.security import HttpBearer
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import (
    action,
    api_view,
    authentication_classes,
    permission_classes,
)
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_dlock import Lock

Decorator = Callable[[Any], Any]

WORKS = "works"
EARLY = "early"
REFUSED = "refused"

TOKEN = "secret-of-user-1"
NAME = "placement:7"
"""The lock of the views; the first argument of each is 7."""

calls: list[bool] = []
"""For each run of a view, whether the lock was held."""


def charge() -> dict[str, int]:
    calls.append(Lock(NAME).locked())
    return {"charged": len(calls)}


class Place(NamedTuple):
    """One row of the table."""

    framework: str
    where: str
    locked: str
    idempotent: str
    urls: Callable[[Decorator], list[URLPattern]]


PLACES: list[Place] = []


def place(framework: str, where: str, *, locked: str = WORKS, idempotent: str = WORKS) -> Any:
    """Add a row; the function gets one of the decorators, and returns the URLs of its views."""

    def add(urls: Callable[[Decorator], list[URLPattern]]) -> Any:
        PLACES.append(Place(framework, where, locked, idempotent, urls))
        return urls

    return add


def at(view: Any) -> list[URLPattern]:
    return [path("<int:number>/", view)]


# -- Django --------------------------------------------------------------------------------


def plain(request: HttpRequest, number: int) -> HttpResponse:
    return JsonResponse(charge(), status=201)


async def asynchronous(request: HttpRequest, number: int) -> HttpResponse:
    return JsonResponse(await sync_to_async(charge)(), status=201)


class Page(LoginRequiredMixin, View):
    def post(self, request: HttpRequest, number: int) -> HttpResponse:
        return plain(request, number)


class AsyncPage(View):
    async def post(self, request: HttpRequest, number: int) -> HttpResponse:
        return await asynchronous(request, number)


@place("Django", "below `login_required`")
def _(guard: Decorator) -> list[URLPattern]:
    return at(login_required(guard(plain)))


@place("Django", "above `login_required`", locked=EARLY, idempotent=EARLY)
def _(guard: Decorator) -> list[URLPattern]:
    return at(guard(login_required(plain)))


@place("Django", "below `login_required`, `async def`")
def _(guard: Decorator) -> list[URLPattern]:
    return at(login_required(guard(asynchronous)))


@place("Django", "between `csrf_exempt`, `require_POST` and `login_required`")
def _(guard: Decorator) -> list[URLPattern]:
    return at(csrf_exempt(require_POST(login_required(guard(csrf_exempt(require_POST(plain)))))))


@place("Django", "on a method, with `method_decorator`")
def _(guard: Decorator) -> list[URLPattern]:
    class OnMethod(LoginRequiredMixin, View):
        @method_decorator(guard)
        def post(self, request: HttpRequest, number: int) -> HttpResponse:
            return plain(request, number)

    return at(OnMethod.as_view())


@place("Django", "on a class with `LoginRequiredMixin`", locked=EARLY, idempotent=EARLY)
def _(guard: Decorator) -> list[URLPattern]:
    return at(guard(type("OnClass", (Page,), {})).as_view())


@place("Django", "around `as_view()`, with `LoginRequiredMixin`", locked=EARLY, idempotent=EARLY)
def _(guard: Decorator) -> list[URLPattern]:
    return at(guard(Page.as_view()))


@place("Django", "around `as_view()` of an async class, below `login_required`")
def _(guard: Decorator) -> list[URLPattern]:
    return at(login_required(guard(AsyncPage.as_view())))


@place("Django", "on a method, without `method_decorator`", locked=REFUSED, idempotent=REFUSED)
def _(guard: Decorator) -> list[URLPattern]:
    class OnMethod(View):
        @guard
        def post(self, request: HttpRequest, number: int) -> HttpResponse:
            return plain(request, number)

    return at(OnMethod.as_view())


# -- Django REST framework -----------------------------------------------------------------


class Bearer(BaseAuthentication):
    def authenticate(self, request: Any) -> tuple[User, str] | None:
        sent = request.headers.get("Authorization")
        return (User(pk=1), TOKEN) if sent == f"Bearer {TOKEN}" else None

    def authenticate_header(self, request: Any) -> str:
        return "Bearer"


class Api(APIView):
    authentication_classes = [Bearer]
    permission_classes = [IsAuthenticated]

    def post(self, request: Any, number: int) -> Response:
        return Response(charge(), status=201)


class Set(ViewSet):
    authentication_classes = [Bearer]
    permission_classes = [IsAuthenticated]

    def create(self, request: Any, number: int) -> Response:
        return Response(charge(), status=201)


def function(request: Any, number: int) -> Response:
    return Response(charge(), status=201)


def of_api(view: Any) -> Any:
    view = permission_classes([IsAuthenticated])(authentication_classes([Bearer])(view))
    return api_view(["POST"])(view)


REST = "Django REST framework"


@place(REST, "below `api_view`")
def _(guard: Decorator) -> list[URLPattern]:
    return at(of_api(guard(function)))


@place(REST, "above `api_view`", locked=EARLY, idempotent=EARLY)
def _(guard: Decorator) -> list[URLPattern]:
    return at(guard(of_api(function)))


@place(REST, "on a method, with `method_decorator`")
def _(guard: Decorator) -> list[URLPattern]:
    class OnMethod(Api):
        @method_decorator(guard)
        def post(self, request: Any, number: int) -> Response:
            return Response(charge(), status=201)

    return at(OnMethod.as_view())


@place(REST, 'on a class, with `method_decorator(…, name="post")`')
def _(guard: Decorator) -> list[URLPattern]:
    return at(method_decorator(guard, name="post")(type("OnPost", (Api,), {})).as_view())


@place(REST, "on a class", locked=EARLY, idempotent=EARLY)
def _(guard: Decorator) -> list[URLPattern]:
    return at(guard(type("OnClass", (Api,), {})).as_view())


@place(REST, "around `as_view()`", locked=EARLY, idempotent=EARLY)
def _(guard: Decorator) -> list[URLPattern]:
    return at(guard(Api.as_view()))


@place(REST, "on a method of a `ViewSet`, with `method_decorator`")
def _(guard: Decorator) -> list[URLPattern]:
    return at(
        method_decorator(guard, name="create")(type("S", (Set,), {})).as_view({"post": "create"})
    )


@place(REST, "around `as_view()` of a `ViewSet`", locked=EARLY, idempotent=EARLY)
def _(guard: Decorator) -> list[URLPattern]:
    return at(guard(Set.as_view({"post": "create"})))


def routed(viewset: Any) -> list[URLPattern]:
    router = SimpleRouter()
    router.register("", viewset, basename="orders")
    return [path("", include(router.urls))]  # type: ignore[list-item]


@place(REST, "below `action`, with `method_decorator`")
def _(guard: Decorator) -> list[URLPattern]:
    class Orders(Set):
        lookup_url_kwarg = "number"

        @action(detail=True, methods=["post"], url_path="pay")
        @method_decorator(guard)
        def pay(self, request: Any, number: str) -> Response:
            return Response(charge(), status=201)

    return routed(Orders)


@place(REST, "above `action`, with `method_decorator`")
def _(guard: Decorator) -> list[URLPattern]:
    class Orders(Set):
        lookup_url_kwarg = "number"

        @method_decorator(guard)
        @action(detail=True, methods=["post"], url_path="pay")
        def pay(self, request: Any, number: str) -> Response:
            return Response(charge(), status=201)

    return routed(Orders)


@place(REST, "on a method, without `method_decorator`", locked=REFUSED, idempotent=REFUSED)
def _(guard: Decorator) -> list[URLPattern]:
    class OnMethod(Api):
        @guard
        def post(self, request: Any, number: int) -> Response:
            return Response(charge(), status=201)

    return at(OnMethod.as_view())


# -- django-ninja --------------------------------------------------------------------------


NINJA = "django-ninja"


class NinjaBearer(HttpBearer):
    def authenticate(self, request: HttpRequest, token: str) -> str | None:
        return token if token == TOKEN else None


class Amount(Schema):
    amount: int


class Charged(Schema):
    charged: int


def api() -> NinjaAPI:
    return NinjaAPI(auth=NinjaBearer(), urls_namespace=f"placement-{len(made)}")


made: list[NinjaAPI] = []


def served(api: NinjaAPI) -> list[URLPattern]:
    made.append(api)
    return [path("", api.urls)]  # type: ignore[list-item]


ROUTE = "/{int:number}/"


def operation(request: HttpRequest, number: int, body: Amount) -> Status[dict[str, int]]:
    return Status(201, charge())


async def async_operation(request: HttpRequest, number: int, body: Amount) -> Any:
    return Status(201, await sync_to_async(charge)())


@place(NINJA, "below `api.post`")
def _(guard: Decorator) -> list[URLPattern]:
    on = api()
    on.post(ROUTE, response={201: Charged})(guard(operation))
    return served(on)


@place(NINJA, "below `api.post`, `async def`")
def _(guard: Decorator) -> list[URLPattern]:
    on = api()
    on.post(ROUTE, response={201: Charged})(guard(async_operation))
    return served(on)


@place(NINJA, "below `router.post`, where the router is used by two APIs")
def _(guard: Decorator) -> list[URLPattern]:
    router, first, second = Router(), api(), NinjaAPI(urls_namespace=f"second-{len(made)}")
    router.post(ROUTE, response={201: Charged})(guard(operation))
    for each in first, second:
        each.add_router("", router)
    return [path("second/", second.urls), *served(first)]  # type: ignore[list-item]


@place(NINJA, "below `api.post`, above `decorate_view(…)` with another decorator")
def _(guard: Decorator) -> list[URLPattern]:
    on = api()
    on.post(ROUTE, response={201: Charged})(guard(decorate_view(csrf_exempt)(operation)))
    return served(on)


@place(NINJA, "above `api.post`", locked=REFUSED, idempotent=REFUSED)
def _(guard: Decorator) -> list[URLPattern]:
    on = api()

    @guard
    @on.post(ROUTE, response={201: Charged})
    def registered(request: HttpRequest, number: int, body: Amount) -> Status[dict[str, int]]:
        return operation(request, number, body)

    return served(on)


@place(NINJA, "in `decorate_view(…)`", locked=EARLY, idempotent=REFUSED)
def _(guard: Decorator) -> list[URLPattern]:
    on = api()

    @on.post(ROUTE, response={201: Charged})
    @decorate_view(guard)
    def around(request: HttpRequest, number: int, body: Amount) -> Status[dict[str, int]]:
        return operation(request, number, body)

    return served(on)


@place(NINJA, "in `decorate_view(…)`, `async def`", locked=EARLY, idempotent=REFUSED)
def _(guard: Decorator) -> list[URLPattern]:
    on = api()

    @on.post(ROUTE, response={201: Charged})
    @decorate_view(guard)
    async def around(request: HttpRequest, number: int, body: Amount) -> Any:
        return await async_operation(request, number, body)

    return served(on)


@place(NINJA, "in `add_decorator(…)`", locked=REFUSED, idempotent=REFUSED)
def _(guard: Decorator) -> list[URLPattern]:
    on = api()
    on.add_decorator(guard)

    @on.post(ROUTE, response={201: Charged})
    def registered(request: HttpRequest, number: int, body: Amount) -> Status[dict[str, int]]:
        return operation(request, number, body)

    return served(on)


@place(NINJA, 'in `add_decorator(…, mode="view")`', locked=EARLY, idempotent=REFUSED)
def _(guard: Decorator) -> list[URLPattern]:
    on = api()
    on.add_decorator(guard, mode="view")

    @on.post(ROUTE, response={201: Charged})
    def around(request: HttpRequest, number: int, body: Amount) -> Status[dict[str, int]]:
        return operation(request, number, body)

    return served(on)
