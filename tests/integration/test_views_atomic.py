"""G15 for views: a request's transaction begins after the acquire and ends before the release."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from django.contrib.auth.models import Group
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_dlock import LeaseLost, locked_view, locks
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

urlpatterns = [
    path("function/", in_lock(write)),
    path("class/", OnClass.as_view()),
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


@pytest.mark.parametrize("kind", ["function", "class", "dispatch", "as-view"])
def test_g15_the_commit_is_visible_when_the_lock_of_a_view_is_released(
    kind: str, seen_at_release: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    response = Client().get(f"/{kind}/")
    assert response.content == b"True"
    assert seen_at_release == [1]
    # The lock warns if it is released inside a transaction that began before the acquire.
    assert [r.message for r in caplog.records if "inside a transaction" in r.message] == []


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


def test_a_lease_that_is_lost_before_the_commit_rolls_back() -> None:
    def view(request: HttpRequest) -> HttpResponse:
        response = write(request)
        found = locks["local"].get("short")
        assert found is not None
        locks["local"].break_("short", owner=found.owner)
        assert told.wait(20)
        return response

    told = threading.Event()
    options: dict[str, Any] = {"using": "local", "ttl": 3, "on_lost": lambda *_: told.set()}
    with pytest.raises(LeaseLost, match="broken"):
        locked_view("short", **options)(view)(HttpRequest())
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
