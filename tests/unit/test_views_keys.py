"""Keys of views that are lists: digests that no other values, and no other view, produce."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import api_view
from rest_framework.views import APIView

from django_dlock import idempotent_view, locked_view, locks
from django_dlock.testing import local_locks

KEY = ["a", "b"]


def names(request: Any = None, **_: Any) -> HttpResponse:
    return HttpResponse(" ".join(info.name for info in locks["default"].list()))


@locked_view(KEY)
def plain(request: HttpRequest, a: str, b: str) -> HttpResponse:
    return names()


@locked_view(KEY)
def other(request: HttpRequest, a: str, b: str) -> HttpResponse:
    return names()


@locked_view(KEY)
async def coroutine(request: HttpRequest, a: str, b: str) -> HttpResponse:
    return names()


class OnMethod(View):
    @method_decorator(locked_view(KEY))
    def post(self, request: HttpRequest, a: str, b: str) -> HttpResponse:
        return names()


@locked_view(KEY)
class OnClass(View):
    def post(self, request: HttpRequest, a: str, b: str) -> HttpResponse:
        return names()


class Plain(View):
    def post(self, request: HttpRequest, a: str, b: str) -> HttpResponse:
        return names()


class Rest(APIView):
    authentication_classes = permission_classes = ()

    @method_decorator(locked_view(KEY))
    def post(self, request: Any, a: str, b: str) -> HttpResponse:
        return names()


@api_view(["POST"])
@locked_view(KEY)
def rest_function(request: Any, a: str, b: str) -> HttpResponse:
    return names()


VIEWS: dict[str, Any] = {
    "plain": plain,
    "coroutine": lambda *args, **kwargs: asyncio.run(coroutine(*args, **kwargs)),  # type: ignore[arg-type]
    "OnMethod": OnMethod.as_view(),
    "OnClass": OnClass.as_view(),
    "Plain": locked_view(KEY)(Plain.as_view()),
    "Rest": Rest.as_view(),
    "rest_function": rest_function,
}
each_view = pytest.mark.parametrize(("name", "view"), VIEWS.items(), ids=VIEWS)


def post(user: Any = None) -> HttpRequest:
    request = RequestFactory().post("/", headers={"accept": "application/json"})
    request.user = AnonymousUser() if user is None else user
    return request


def lock_of(view: Any, user: Any = None, **kwargs: Any) -> str:
    with local_locks():
        response = view(post(user), **kwargs)
    assert response.status_code == 200
    return str(response.content.decode())


@each_view
def test_g1_values_cannot_be_smuggled_between_arguments(name: str, view: Any) -> None:
    """As they could with a template: ``cart:{a}:{b}``."""
    locked = lock_of(view, a="1:2", b="3")
    assert locked.startswith(f"{__name__}.{name}:v1:")
    assert locked not in (lock_of(view, a="1", b="2:3"), lock_of(view, a="1:2:3", b=""))
    assert locked == lock_of(view, a="1:2", b="3")


def test_g1_a_digest_is_that_of_one_view_and_of_one_type() -> None:
    assert lock_of(plain, a="1", b="2") != lock_of(other, a="1", b="2")
    assert lock_of(plain, a="1", b="2") != lock_of(plain, a=1, b="2")


def test_neither_the_order_of_a_list_nor_that_of_the_call_matters() -> None:
    view = locked_view(["b", "a"])(plain.__wrapped__)  # type: ignore[attr-defined]
    assert lock_of(view, a="1", b="2") == lock_of(plain, a="1", b="2")
    with local_locks():
        assert plain(post(), "1", "2").content.decode() == lock_of(plain, a="1", b="2")


# -- fields of the request -----------------------------------------------------------------


FIELDS = ["request.user.pk", "a"]


def of_user(request: HttpRequest, a: str) -> HttpResponse:
    return names()


class OfUser(View):
    @method_decorator(locked_view(FIELDS))
    def post(self, request: HttpRequest, a: str) -> HttpResponse:
        return names()


each_field = pytest.mark.parametrize(
    "view", [locked_view(FIELDS)(of_user), OfUser.as_view()], ids=["function", "method"]
)


@each_field
def test_a_list_may_name_fields_of_the_request(view: Any) -> None:
    first = lock_of(view, User(pk=1), a="x")
    assert first not in (lock_of(view, User(pk=2), a="x"), lock_of(view, User(pk=1), a="y"))


@each_field
def test_an_anonymous_visitor_without_the_field_has_to_log_in(view: Any) -> None:
    with local_locks():
        assert view(post(), a="x").status_code == 403


def test_a_client_may_be_a_list() -> None:
    view = idempotent_view(client=["request.user.account.pk"], required=True)(of_user)
    request = post(User(pk=1))
    request.META["HTTP_IDEMPOTENCY_KEY"] = "k1"
    assert view(request, a="x").status_code == 401


# -- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ([], "empty list"),
        (["nubmer"], "'nubmer', which does not exist; known arguments: request, a"),
        (["request"], "names the request, which has no stable form"),
        (["request.session.session_key"], "is the key of a session"),
    ],
)
def test_wrong_lists_are_refused_at_decoration(key: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"The key of @locked_view.*{message}"):
        locked_view(key)(of_user)


def test_g1_a_misspelt_name_in_a_class_is_an_error_and_not_one_lock_for_all() -> None:
    class Misspelt(View):
        @method_decorator(locked_view(["nubmer"]))
        def post(self, request: HttpRequest, number: int) -> HttpResponse:
            return names()

    with pytest.raises(TypeError, match=r"\{nubmer\} cannot be looked up.*Misspelt"):
        Misspelt.as_view()(post(), number=7)


def test_an_optional_argument_may_be_left_out() -> None:
    @locked_view(["a"])
    def view(request: HttpRequest, a: str = "x") -> HttpResponse:
        return names()

    assert lock_of(view) == lock_of(view, a="x") != lock_of(view, a="y")
