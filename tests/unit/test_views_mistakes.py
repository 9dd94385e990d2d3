"""Mistakes in the use of ``locked_view`` and ``idempotent_view``: what the errors say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt

from django_dlock import Lock, idempotent_view, keyed_digest, locked, locked_view
from django_dlock.testing import local_locks


def pay(request: HttpRequest, number: int = 0) -> HttpResponse:
    return HttpResponse("paid")


async def apay(request: HttpRequest) -> HttpResponse:
    return pay(request)


class Pay(View):
    def get(self, request: HttpRequest, number: int) -> HttpResponse:
        return pay(request)


def request_of() -> HttpRequest:
    request = RequestFactory().post("/", headers={"idempotency-key": "k1"})
    request.user = AnonymousUser()
    return request


# -- a decorator without its key -----------------------------------------------------------


NO_KEY = r"needs a key first: @locked_view\('order:\{number\}'\)"


@pytest.mark.parametrize("arguments", [{}, {"number": 7}], ids=["none", "of the URL"])
def test_a_view_in_place_of_the_key_is_named_in_its_first_request(arguments: Any) -> None:
    view: Callable[..., Any] = locked_view(pay)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"test_views_mistakes\.pay .*{NO_KEY}"):
        view(request_of(), **arguments)


def test_a_method_in_place_of_the_key_is_named_in_its_first_request() -> None:
    class Keyless(View):
        @locked_view  # type: ignore[arg-type]
        def post(self, request: HttpRequest) -> HttpResponse:
            return pay(request)

    with pytest.raises(TypeError, match=rf"Keyless\.post .*{NO_KEY}"):
        Keyless.as_view()(request_of())


@pytest.mark.parametrize(
    ("view", "name"),
    [(Pay, "Pay"), (Pay.as_view(), "Pay"), (apay, "apay")],
    ids=["class", "as_view", "coroutine function"],
)
def test_a_view_that_can_be_no_key_is_refused_at_decoration(view: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"test_views_mistakes\.{name} .*{NO_KEY}"):
        locked_view(view)


def test_what_is_no_view_is_refused() -> None:
    with pytest.raises(TypeError, match="@locked_view takes a view, not 'pay'"):
        locked_view("key")("pay")  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"@idempotent_view takes a view.* not 'pay'"):
        idempotent_view("pay")  # type: ignore[call-overload]


# -- a secret in a key ---------------------------------------------------------------------


SESSION = "cart:{request.session.session_key}"


@pytest.mark.parametrize(
    ("decorate", "what"),
    [
        (lambda: locked_view(SESSION), "The key of @locked_view"),
        (lambda: idempotent_view(client=SESSION), "client of @idempotent_view"),
        (lambda: locked(SESSION)(pay), r"The key of @locked on .*\.pay"),
        (
            lambda: locked("cart:{view.request.session.session_key}")(lambda view: None),
            "The key of @locked on",
        ),
    ],
)
def test_the_key_of_a_session_is_refused_at_decoration(
    decorate: Callable[[], object], what: str
) -> None:
    with pytest.raises(ValueError, match=rf"{what}.*is the key of a session.*keyed_digest"):
        decorate()


def test_a_visitor_without_the_value_of_a_keyed_digest_has_to_log_in() -> None:
    view = locked_view(lambda request: f"cart:{keyed_digest(request.GET.get('it'))}")(pay)
    assert view(request_of()).status_code == 302


# -- a method ------------------------------------------------------------------------------


def with_request(self: View, request: HttpRequest) -> HttpResponse:
    return pay(request)


def with_arguments(self: View, *args: Any) -> HttpResponse:
    return pay(*args)


@pytest.mark.parametrize("method", [with_request, with_arguments])
@pytest.mark.parametrize(
    ("decorator", "name"),
    [
        (locked_view("cart"), "locked_view"),
        (idempotent_view, "idempotent_view"),
        (idempotent_view(), "idempotent_view"),
    ],
)
def test_the_error_for_a_method_says_what_to_use(method: Any, decorator: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"@{name} on .*@method_decorator\({name}\(\.\.\.\)\)"):
        decorator(method)


def test_a_method_below_another_decorator_is_locked() -> None:
    @method_decorator([locked_view("pay:{number}"), never_cache], name="dispatch")
    class Uncached(Pay):
        def get(self, request: HttpRequest, number: int) -> HttpResponse:
            return HttpResponse(str(Lock(f"pay:{number}").locked()))

    with local_locks():
        assert Uncached.as_view()(RequestFactory().get("/"), number=7).content == b"True"


def test_a_partial_below_another_decorator_keeps_its_arguments() -> None:
    def order(request: HttpRequest, number: int, kind: str = "") -> HttpResponse:
        return HttpResponse(str(Lock(f"pay:{number}:{kind}").locked()))

    refund = csrf_exempt(functools.partial(order, kind="refund"))
    with local_locks():
        assert locked_view("pay:{number}:{kind}")(refund)(request_of(), 7).content == b"True"


@pytest.mark.parametrize("decorator", [locked_view("pay"), idempotent_view], ids=["lock", "once"])
def test_a_function_that_stands_for_a_method_is_a_view(decorator: Any) -> None:
    def endpoint(method: Callable[..., Any]) -> Callable[..., HttpResponse]:
        @functools.wraps(method)
        def respond(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            return method(Pay(), request, *args, **kwargs)

        return respond

    assert decorator(endpoint(Pay.get))


# -- a misspelt field ----------------------------------------------------------------------


@locked_view("pay:{nubmer}")
class OnClass(Pay):
    pass


class OnMethod(View):
    @method_decorator(locked_view("pay:{nubmer}"))
    def post(self, request: HttpRequest, number: int) -> HttpResponse:
        return pay(request)


@idempotent_view(client="{nubmer}")
class IdempotentOnClass(Pay):
    pass


@locked_view("pay:{nubmer}")
def on_function(request: HttpRequest, **others: Any) -> HttpResponse:
    return pay(request)


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (OnClass.as_view(), "OnClass"),
        (OnMethod.as_view(), "OnMethod"),
        (IdempotentOnClass.as_view(), "IdempotentOnClass"),
        (locked_view("pay:{nubmer}")(Pay.as_view()), "Pay"),
        (idempotent_view(client="{nubmer}")(Pay.as_view()), "Pay"),
        (on_function, "on_function"),
    ],
)
def test_the_error_for_a_misspelt_field_names_the_view_and_its_arguments(
    view: Any, name: str
) -> None:
    """But none of their values."""
    with pytest.raises(
        TypeError, match=rf"\{{nubmer\}}.*test_views_mistakes\.{name} .* request, number$"
    ):
        view(request_of(), number=7654)
