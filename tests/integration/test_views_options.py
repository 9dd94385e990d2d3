"""``locked_view``: which requests it locks, and what it does if it cannot acquire a lock."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, override_settings
from django.utils.decorators import method_decorator
from django.views import View

from django_dlock import BackendUnavailable, Lock, locked_view
from testproject.servers import RedisServer

HTML = {"accept": "text/html"}
JSON = {"accept": "application/json"}


def request_by(user: Any = None, method: str = "GET", **headers: str) -> HttpRequest:
    request = RequestFactory().generic(method, "/some/path/?page=2", headers=headers or HTML)
    if user is not None:
        request.user = user
    return request


class Ran:
    """A view, plain or asynchronous, that counts its calls and reports whether its lock is held."""

    def __init__(self, asynchronous: bool, key: Any = "view:it", **options: Any) -> None:
        self.count = 0
        guard = locked_view(key, **options)

        def view(request: HttpRequest) -> HttpResponse:
            self.count += 1
            return HttpResponse("ran")

        async def aview(request: HttpRequest) -> HttpResponse:
            return view(request)

        if asynchronous:
            guarded = guard(aview)
            self.answer = lambda request: asyncio.run(guarded(request))
        else:
            self.answer = guard(view)


each_kind = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


# -- anonymous visitors ------------------------------------------


KEYS = [
    "checkout:{request.user.pk}",
    "checkout:{request.user.profile.number}",
    lambda request: request.user.pk and f"checkout:{request.user.pk}",
]


@each_kind
@pytest.mark.parametrize("key", KEYS, ids=["pk", "missing", "callable"])
def test_an_anonymous_visitor_is_sent_to_the_login_page(asynchronous: bool, key: Any) -> None:
    view = Ran(asynchronous, key)
    with override_settings(LOGIN_URL="/log-in/"):
        answer = view.answer(request_by(AnonymousUser()))
    assert answer.status_code == 302
    assert answer["Location"] == "/log-in/?next=/some/path/%3Fpage%3D2"
    assert view.count == 0


@each_kind
def test_an_anonymous_client_that_prefers_json_is_forbidden(asynchronous: bool) -> None:
    view = Ran(asynchronous, KEYS[0])
    answer = view.answer(request_by(AnonymousUser(), **JSON))
    assert answer.status_code == 403
    assert answer["Content-Type"] == "application/problem+json"
    assert view.count == 0


def test_a_class_based_view_redirects_as_well() -> None:
    @method_decorator(locked_view(KEYS[0]), name="dispatch")
    class Checkout(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    assert Checkout.as_view()(request_by(AnonymousUser())).status_code == 302
    assert Checkout.as_view()(request_by(User(pk=3))).status_code == 200


@pytest.mark.parametrize("user", [User(), None], ids=["no primary key", "no users"])
def test_a_missing_value_of_another_user_is_an_error(user: User | None) -> None:
    with pytest.raises(TypeError, match="checkout"):
        Ran(False, KEYS[0]).answer(request_by(user))


# -- methods ---------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    ("methods", "free", "locked"),
    [
        (None, [], ["GET", "POST"]),
        (["POST"], ["GET", "PUT"], ["POST"]),
        (["GET", "POST"], ["FOO", "PUT"], ["GET", "POST"]),
        (
            "unsafe",
            ["GET", "HEAD", "OPTIONS", "TRACE"],
            ["POST", "PUT", "PATCH", "DELETE", "MOVE", "QUERY", "FOO"],
        ),
    ],
)
def test_only_the_named_methods_need_the_lock(
    asynchronous: bool, methods: Any, free: list[str], locked: list[str]
) -> None:
    view = Ran(asynchronous, methods=methods)
    with Lock("view:it", bound=False):
        for method in free:
            assert view.answer(request_by(method=method)).status_code == 200, method
        for method in locked:
            assert view.answer(request_by(method=method)).status_code == 409, method
    assert view.count == len(free)


class Move(View):
    http_method_names = ["get", "move"]

    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("ran")

    move = get


def test_a_class_based_view_with_a_method_of_its_own_is_locked() -> None:
    guard = locked_view("view:it", methods="unsafe")
    on_class, on_view = guard(type("OnClass", (Move,), {})).as_view(), guard(Move.as_view())
    with Lock("view:it", bound=False):
        for view in (on_class, on_view):
            assert view(request_by(method="GET")).status_code == 200
            assert view(request_by(method="MOVE")).status_code == 409


def test_a_rest_framework_view_with_a_method_of_its_own_is_locked() -> None:
    from rest_framework.decorators import api_view

    @api_view(["GET", "QUERY"])
    @locked_view("view:it", methods="unsafe")
    def find(request: Any) -> HttpResponse:
        return HttpResponse("ran")

    with Lock("view:it", bound=False):
        assert find(request_by(method="GET")).status_code == 200
        assert find(request_by(method="QUERY")).status_code == 409


def test_methods_may_be_given_by_an_iterator() -> None:
    view = Ran(False, methods=(name for name in ["POST"]))
    with Lock("view:it", bound=False):
        assert view.answer(request_by(method="POST")).status_code == 409


@pytest.mark.parametrize(
    "key",
    [
        "view:{request.GET[format]}",
        "view:{request.headers[X-Format]}",
        "view:{request.META[HTTP_X_FORMAT]}",
        ["request.POST[format]"],
    ],
)
@pytest.mark.parametrize("user", [AnonymousUser(), User(pk=1)], ids=["anonymous", "user"])
@each_kind
def test_a_value_that_the_visitor_has_left_out_is_a_bad_request(
    asynchronous: bool, key: Any, user: Any
) -> None:
    view = Ran(asynchronous, key)
    assert view.answer(request_by(user)).status_code == 400
    assert view.answer(request_by(user, **JSON))["Content-Type"] == "application/problem+json"
    assert view.count == 0


@pytest.mark.parametrize("key", ["view:{request.tenant}", "view:{request.META[nothing]}"])
@each_kind
def test_a_missing_value_that_a_login_would_not_add_is_an_error(
    asynchronous: bool, key: str
) -> None:
    with pytest.raises(TypeError, match="cannot be looked up"):
        Ran(asynchronous, key).answer(request_by(AnonymousUser()))


@pytest.mark.parametrize("methods", ["POST", ["post"], [1], []])
def test_methods_that_are_not_names_are_refused(methods: Any) -> None:
    with pytest.raises(TypeError, match="methods is"):
        locked_view("it", methods=methods)


# -- no answer -------------------------------------------------------------------------------


@pytest.fixture
def down(own_redis: RedisServer) -> Any:
    """Settings whose backend does not answer."""
    backend = "django_dlock.backends.redis.RedisBackend"
    own_redis.stop()
    with override_settings(DLOCKS={"default": {"BACKEND": backend, "LOCATION": own_redis.url}}):
        yield


@each_kind
def test_an_outage_is_raised_by_default_and_the_view_does_not_run(
    down: None, asynchronous: bool
) -> None:
    view = Ran(asynchronous)
    with pytest.raises(BackendUnavailable):
        view.answer(request_by())
    assert view.count == 0


@each_kind
@pytest.mark.parametrize("headers", [HTML, JSON], ids=["html", "json"])
def test_an_outage_may_be_answered_with_503(
    down: None, asynchronous: bool, headers: dict[str, str]
) -> None:
    view = Ran(asynchronous, if_unavailable=503)
    answer = view.answer(request_by(**headers))
    assert answer.status_code == 503
    assert answer["Retry-After"] == "5"
    assert view.count == 0


@each_kind
def test_a_view_may_run_without_its_lock_during_an_outage(
    down: None, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    view = Ran(asynchronous, if_unavailable="pass")
    assert view.answer(request_by()).content == b"ran"
    (warning,) = (r for r in caplog.records if "GET /some/path/" in r.getMessage())
    assert warning.levelno == logging.WARNING


def test_a_view_that_runs_without_its_lock_has_its_transaction(
    down: None, monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any, db: None
) -> None:
    from django.db import connection

    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    seen: list[int] = []

    @locked_view("view:it", if_unavailable="pass")
    def view(request: HttpRequest) -> HttpResponse:
        seen.append(len(connection.savepoint_ids))
        return HttpResponse()

    outside = len(connection.savepoint_ids)
    view(request_by())
    assert seen == [outside + 1]


@pytest.mark.parametrize("wrong", ["skip", 500, None])
def test_other_values_for_an_outage_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="if_unavailable is"):
        locked_view("it", if_unavailable=wrong)


def test_the_key_of_a_rest_framework_view_can_use_the_user_of_the_token() -> None:
    from rest_framework.authentication import BaseAuthentication
    from rest_framework.response import Response
    from rest_framework.views import APIView

    class Token(BaseAuthentication):
        def authenticate(self, request: Any) -> Any:
            return (User(pk=5), None) if "X-Token" in request.headers else None

    class Checkout(APIView):
        authentication_classes = (Token,)

        @method_decorator(locked_view(KEYS[0]))
        def post(self, request: Any) -> Any:
            return Response({"held": Lock("checkout:5").locked()})

    view = Checkout.as_view()
    assert view(request_by(None, "POST", **JSON, **{"X-Token": "1"})).data == {"held": True}
    assert view(request_by(None, "POST", **JSON)).status_code == 403


@pytest.mark.parametrize("wrong", ["stop", None, True])
def test_a_wrong_answer_to_a_disconnect_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="takes 'finish' or 'cancel'"):
        locked_view("it", on_disconnect=wrong)
