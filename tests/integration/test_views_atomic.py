"""G15 for views: a request's transaction begins after the acquire and ends before the release."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from django.contrib.auth.models import Group
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, TestCase
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from ninja import NinjaAPI
from ninja.decorators import decorate_view
from rest_framework.decorators import api_view

from django_dlock import LeaseLost, idempotent_view, locked_view, locks
from django_dlock.backends.local import LocalBackend

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


def write(request: HttpRequest, **_: Any) -> HttpResponse:
    Group.objects.create(name="written")
    return HttpResponse(f"{connection.in_atomic_block}")


def written() -> int:
    return Group.objects.filter(name="written").count()


def on_another_connection(function: Callable[[], T]) -> T:
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(function())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


@pytest.fixture
def seen_at_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows another connection sees just before each release."""
    seen: list[int] = []
    release = LocalBackend.release

    def watched(self: LocalBackend, name: str, owner: str, **options: Any) -> Any:
        seen.append(on_another_connection(written))
        return release(self, name, owner, **options)

    monkeypatch.setattr(LocalBackend, "release", watched)
    yield seen
    locks.reset()


class Writes(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return write(request)


@locked_view("it", using="local")
class OnClass(Writes):
    pass


@method_decorator(locked_view("it", using="local"), name="dispatch")
class OnDispatch(Writes):
    pass


class OnMethod(View):
    """Django opens the transaction, because ``as_view()`` does not see how a method is marked."""

    @method_decorator(locked_view("it", using="local"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return write(request)

    @method_decorator(idempotent_view(client="all", using="local"))
    def post(self, request: HttpRequest) -> HttpResponse:
        return write(request)

    @method_decorator(locked_view("it", using="local", hold_until="release"))
    def put(self, request: HttpRequest) -> HttpResponse:
        return write(request)


class OnSavepoint(OnMethod):
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        with transaction.atomic():
            response = super().dispatch(request, *args, **kwargs)
            transaction.set_rollback(True)
        return response


class OnCommitRaises(View):
    def _respond(self, request: HttpRequest) -> HttpResponse:
        transaction.on_commit(lambda: 1 // 0)
        return write(request)

    get = method_decorator(locked_view("it", using="local"))(_respond)
    post = method_decorator(idempotent_view(client="all", using="local"))(_respond)


def fail(request: HttpRequest) -> HttpResponse:
    write(request)
    raise ZeroDivisionError


async def awrite(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


class AsyncWrites(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


in_lock = locked_view("it", using="local")
outer = locked_view("outer", using="local")


def key_in_transaction(request: HttpRequest) -> str:
    return f"{connection.in_atomic_block}"


def in_lock_name(request: HttpRequest) -> HttpResponse:
    return HttpResponse(next(iter(locks["local"].list())).name)


api = NinjaAPI(urls_namespace="atomic")
api.get("/below/")(in_lock(write))


@api.get("/around/")
@decorate_view(in_lock)
def around(request: HttpRequest) -> HttpResponse:
    return write(request)


urlpatterns = [
    path("ninja/", api.urls),
    path("name/", locked_view(key_in_transaction, using="local")(in_lock_name)),
    path("function/", in_lock(write)),
    path("class/", OnClass.as_view()),
    path("method/", OnMethod.as_view()),
    path("api-view/", api_view(["GET"])(locked_view("it", using="local")(write))),
    path("savepoint/", OnSavepoint.as_view()),
    path("on-commit-raises/", OnCommitRaises.as_view()),
    path("dispatch/", OnDispatch.as_view()),
    path("as-view/", in_lock(Writes.as_view())),
    path("twice/", outer(in_lock(write))),
    path("class-twice/", outer(OnDispatch.as_view())),
    path("fails/", in_lock(fail)),
    path("unmarked-inside/", in_lock(transaction.non_atomic_requests(write))),
    path("unmarked-outside/", transaction.non_atomic_requests(in_lock(write))),
    path("unmarked-twice/", transaction.non_atomic_requests(outer(in_lock(write)))),
    path("async/", in_lock(awrite)),
    path("async-class/", in_lock(AsyncWrites).as_view()),
    path("async-unmarked/", in_lock(transaction.non_atomic_requests(awrite))),
]


@pytest.mark.parametrize(
    "kind",
    [
        *("function", "class", "method", "dispatch", "as-view", "api-view"),
        *("ninja/below", "ninja/around"),
    ],
)
def test_g15_the_commit_is_visible_when_the_lock_of_a_view_is_released(
    kind: str, seen_at_release: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    response = Client().get(f"/{kind}/")
    assert response.content == b"True"
    assert seen_at_release == [1]
    # The lock warns if it is released inside a transaction that began before the acquire.
    assert [r.message for r in caplog.records if "inside a transaction" in r.message] == []


def test_g15_the_transaction_of_a_view_begins_inside_its_lock() -> None:
    # What it reads first, it must not read before the lock is held.
    assert Client().get("/name/").content == b"False"


def test_g15_the_commit_is_visible_when_the_lock_of_an_idempotent_method_is_released(
    seen_at_release: list[int],
) -> None:
    Client().post("/method/", headers={"Idempotency-Key": "one"})
    assert seen_at_release == [1]


def test_a_method_may_release_before_the_transaction_ends(seen_at_release: list[int]) -> None:
    Client().put("/method/")
    assert seen_at_release == [0]


@pytest.mark.parametrize("method", ["get", "post"])
def test_g6_a_method_releases_with_its_request_if_a_function_of_on_commit_raises(
    method: str,
) -> None:
    client = Client(raise_request_exception=False, headers={"Idempotency-Key": "one"})
    response = getattr(client, method)("/on-commit-raises/")
    # The traceback of the exception has the functions that were not called.
    assert response.exc_info[0] is ZeroDivisionError
    assert written() == 1
    assert list(locks["local"].list()) == []


class TwoRequests(TestCase):
    def test_the_second_request_gets_the_lock_of_a_method_whose_savepoint_is_rolled_back(
        self,
    ) -> None:
        for _ in range(2):
            assert self.client.get("/savepoint/").status_code == 200

    def test_the_second_request_of_a_test_gets_the_lock_of_a_method(self) -> None:
        for _ in range(2):
            assert self.client.get("/method/").status_code == 200
            Group.objects.all().delete()


def test_a_method_that_is_called_twice_in_a_transaction_refuses_the_second_call() -> None:
    options: dict[str, Any] = {"if_contended": "wait", "wait": 5, "using": "local"}
    called = locked_view("it", **options)(write)
    with transaction.atomic():
        assert [called(HttpRequest()).status_code for _ in range(2)] == [200, 409]


@pytest.mark.parametrize("kind", ["twice", "class-twice"])
def test_g15_the_transaction_ends_inside_both_of_two_locks(
    kind: str, seen_at_release: list[int]
) -> None:
    assert Client().get(f"/{kind}/").content == b"True"
    assert seen_at_release == [1, 1]


def test_g15_an_exception_rolls_back_before_the_release(seen_at_release: list[int]) -> None:
    with pytest.raises(ZeroDivisionError):
        Client().get("/fails/")
    assert seen_at_release == [0]
    assert written() == 0


@pytest.mark.parametrize("begun", ["in the lock", "before the lock"])
def test_a_lease_that_is_lost_before_the_commit_rolls_back(
    begun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def view(request: HttpRequest) -> HttpResponse:
        response = write(request)
        found = locks["local"].get("short")
        assert found is not None
        locks["local"].break_("short", owner=found.owner)
        assert told.wait(20)
        return response

    told = threading.Event()
    options: dict[str, Any] = {"using": "local", "ttl": 3, "on_lost": lambda *_: told.set()}
    locked = locked_view("short", **options)(view)
    if begun == "before the lock":
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", False)
        locked = transaction.atomic(locked)
    with pytest.raises(LeaseLost, match="broken"):
        locked(HttpRequest())
    assert written() == 0


@pytest.mark.parametrize("kind", ["unmarked-inside", "unmarked-outside", "unmarked-twice"])
def test_a_view_marked_non_atomic_gets_no_transaction(kind: str) -> None:
    assert Client().get(f"/{kind}/").content == b"False"


def test_without_atomic_requests_there_is_no_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", False)
    assert Client().get("/function/").content == b"False"


@pytest.mark.parametrize("kind", ["async", "async-class"])
async def test_an_asynchronous_view_with_atomic_requests_is_refused_with_djangos_error(
    kind: str,
) -> None:
    with pytest.raises(RuntimeError, match="You cannot use ATOMIC_REQUESTS with async views"):
        await AsyncClient().get(f"/{kind}/")


async def test_an_asynchronous_view_without_its_transaction_runs() -> None:
    assert (await AsyncClient().get("/async-unmarked/")).status_code == 200


def test_of_two_requests_the_second_sees_what_the_first_has_written() -> None:
    """Without the order of G15, both sometimes count the same number."""

    def count_and_add(request: HttpRequest) -> HttpResponse:
        name = f"number {Group.objects.count()}"
        Group.objects.create(name=name)
        return HttpResponse(name)

    view = locked_view("count", using="local", if_contended="wait", wait=60)(count_and_add)
    names: list[bytes] = []

    def work() -> None:
        try:
            names.extend(view(HttpRequest()).content for _ in range(10))
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 40
