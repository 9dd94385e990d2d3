"""What a ``Lock`` does while its backend does not answer: ``if_unavailable``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from pytest_django import DjangoDbBlocker

from django_dlock import (
    BackendRefused,
    BackendUnavailable,
    Lock,
    LockNotAcquired,
    conf,
    locked,
    locked_view,
    signals,
)
from django_dlock.core import dispatch
from testproject.processes import HOST, free_port
from testproject.servers import RedisServer
from tests.support import databases, postgres
from tests.support.aliases import TIMEOUT, Dlocks, alias, configured

PATIENCE = 20.0
PATIENT = {"command_timeout": 10.0, "outage_patience": 0.1}
BACKENDS = "django_dlock.backends"


def _entry(path: str, location: object = None, **options: object) -> dict[str, Any]:
    """An alias that gives up soon."""
    entry: dict[str, Any] = {
        "BACKEND": f"{BACKENDS}.{path}",
        "OPTIONS": {"command_timeout": TIMEOUT, "outage_patience": 0.1, **options},
    }
    return entry if location is None else {**entry, "LOCATION": location}


def _redis() -> dict[str, Any]:
    return _entry("redis.RedisBackend", f"redis://{HOST}:{free_port()}")


def _failover() -> Dlocks:
    options = {"primary": "one", "standby": "two", "failover_after": None, "database": "record"}
    both = _entry("failover.FailoverBackend", **options)
    return {"default": both, "one": _redis(), "two": _redis()}


DOWN: dict[str, Callable[[], Dlocks]] = {
    "redis": lambda: {"default": _redis()},
    "redlock": lambda: {
        "default": _entry(
            "redlock.RedlockBackend", [f"redis://{HOST}:{free_port()}" for _ in range(3)]
        )
    },
    "database": lambda: {"default": _entry("database.DatabaseBackend", database="gone")},
    "zookeeper": lambda: {"default": _entry("zookeeper.ZooKeeperBackend", f"{HOST}:{free_port()}")},
    "etcd": lambda: {"default": _entry("etcd.EtcdBackend", f"http://{HOST}:{free_port()}")},
    "failover": _failover,
}
"""Aliases whose servers do not run."""


@pytest.fixture(params=DOWN)
def down(request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    gone = postgres.settings_for(f"postgresql://nobody@{HOST}:{free_port()}/nothing")
    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())
        stack.enter_context(databases.added("gone", gone))
        stack.enter_context(databases.added("record", gone))
        stack.enter_context(configured(DOWN[request.param]()))
        yield


@pytest.fixture
def redis_down() -> Iterator[None]:
    with configured({"default": _redis()}):
        yield


@contextmanager
def hearing(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """Collects what is sent with the signal."""
    heard: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        heard.append(kwargs)

    signal.connect(receive)
    try:
        yield heard
    finally:
        signal.disconnect(receive)


def in_thread(function: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join(PATIENCE)
    (answer,) = answers
    return answer


# -- on every backend --------------------------------------------------------------------------


@pytest.mark.usefixtures("down")
class TestPolicies:
    def test_the_default_raises(self) -> None:
        with pytest.raises(BackendUnavailable):
            Lock("name").acquire()

    def test_local_locks_the_name_in_this_process(self, caplog: pytest.LogCaptureFixture) -> None:
        with hearing(signals.acquired) as acquired:
            with Lock("name", if_unavailable="local") as lock:
                assert (lock.state, lock.token) == ("held", None)
                assert lock.owner
                other = Lock("name", if_unavailable="local")
                assert in_thread(lambda: other.acquire(timeout=0.2)) is False
                assert in_thread(lambda: Lock("else", if_unavailable="local").acquire()) is True
                lock.renew()
                lock.check()
            assert lock.state == "free"
            # The name is free again, also for another thread.
            assert in_thread(lambda: Lock("name", if_unavailable="local").acquire()) is True
            assert dispatch.flush(PATIENCE)
        assert {(told["token"], told["reason"]) for told in acquired} == {(None, "unavailable")}
        assert "so the name is locked in this process only" in caplog.text

    def test_skip_acquires_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        with hearing(signals.gave_up) as gave_up:
            lock = Lock("name", if_unavailable="skip")
            assert lock.acquire() is False
            assert lock.acquire(blocking=False) is False
            assert lock.state == "free"
            with pytest.raises(LockNotAcquired) as caught, lock:
                pytest.fail("the body ran")
            assert isinstance(caught.value.__cause__, BackendUnavailable)
            assert dispatch.flush(PATIENCE)
        assert [told["reason"] for told in gave_up] == ["unavailable"] * 3
        assert "so the lock is not acquired" in caplog.text

    async def test_coroutines_follow_the_same_policies(self) -> None:
        with pytest.raises(BackendUnavailable):
            await Lock("name").aacquire()
        async with Lock("name", if_unavailable="local") as lock:
            assert (lock.state, lock.token) == ("held", None)
            other = Lock("name", if_unavailable="local", bound=False)
            assert await other.aacquire(timeout=0.1) is False
            await lock.arenew()
        assert await other.aacquire() is True
        await other.arelease()
        skipping = Lock("name", if_unavailable="skip")
        assert await skipping.aacquire() is False
        with pytest.raises(LockNotAcquired):
            async with skipping:
                pytest.fail("the body ran")


# -- what follows from it ----------------------------------------------------------------------


def test_the_alias_has_a_default_which_a_lock_may_override() -> None:
    with configured({"default": {**_redis(), "IF_UNAVAILABLE": "skip"}}):
        assert Lock("name").acquire() is False
        with pytest.raises(BackendUnavailable):
            Lock("name", if_unavailable="raise").acquire()
        assert not conf.problems()
        with pytest.raises(ValueError, match=r"if_unavailable is 'pass'; it takes one of \['raise"):
            Lock("name", if_unavailable="pass")  # type: ignore[arg-type]
    with configured({"default": {**_redis(), "IF_UNAVAILABLE": "pass"}}):
        (problem,) = conf.problems()
        assert problem.id == "E004"
        assert problem.hint.startswith(
            "It takes one of ['raise', 'local', 'skip']: what a Lock does"
        )


@pytest.mark.usefixtures("redis_down")
def test_g6_a_local_lock_is_renewed_in_this_process_and_ends_with_max_hold() -> None:
    lost = threading.Event()
    # Renewed after a third of the TTL, on a busy machine later.
    ttl = 4.0
    with hearing(signals.renewed) as renewed:
        lock = Lock(
            "name",
            ttl=ttl,
            max_hold=5.0,
            if_unavailable="local",
            on_lost=lambda _lock, reason: reason == "max_hold" and lost.set(),
        )
        assert lock.acquire()
        assert lost.wait(PATIENCE)
        assert dispatch.flush(PATIENCE)
    assert renewed
    # Nobody else has to wait for it any longer.
    assert in_thread(lambda: Lock("name", if_unavailable="local").acquire()) is True


@pytest.mark.usefixtures("redis_down")
def test_a_second_acquire_of_the_local_holder_does_not_wait_for_itself() -> None:
    with Lock("name", reentrant=True, if_unavailable="local") as outer:
        assert Lock("name", if_unavailable="local").acquire(blocking=False) is False
        with Lock("name", reentrant=True, if_unavailable="local") as inner:
            assert inner.owner == outer.owner
        assert outer.held


def test_g1_a_lease_that_this_process_got_before_the_outage_excludes_local_locks(
    own_redis: RedisServer,
) -> None:
    # Each call has time. A server that does not run refuses at once.
    entry = alias(own_redis.url, TTL=60.0, OPTIONS=PATIENT)
    with configured({"default": entry}):
        lock = Lock("name", ttl=60)
        assert lock.acquire()
        own_redis.kill()
        assert in_thread(lambda: Lock("name", if_unavailable="local").acquire(timeout=0)) is False
        assert lock.held


def test_a_backend_that_is_back_is_used_again_and_is_never_told_of_local_locks(
    own_redis: RedisServer,
) -> None:
    own_redis.kill()
    # Each call has time. A server that does not run refuses at once.
    entry = alias(own_redis.url, TTL=60.0, OPTIONS=PATIENT)
    with configured({"default": {**entry, "IF_UNAVAILABLE": "local"}}):
        lock = Lock("name")
        assert lock.acquire()
        own_redis.restart()
        assert lock.locked() is False
        with Lock("name", bound=False) as granted:
            assert granted.token is not None
            lock.release()
            assert granted.locked() is True


def test_settings_that_the_server_refuses_are_no_outage() -> None:
    with RedisServer(password="secret") as server:
        url = f"redis://:wrong@{HOST}:{server.port}"
        entry = alias(url, TTL=60.0, OPTIONS=PATIENT, IF_UNAVAILABLE="local")
        with configured({"default": entry}), pytest.raises(BackendRefused):
            Lock("name").acquire()


@pytest.mark.usefixtures("redis_down")
@pytest.mark.django_db(transaction=True)
def test_g3_a_local_lock_fences_nothing() -> None:
    with (
        Lock("name", if_unavailable="local") as lock,
        pytest.raises(BackendUnavailable, match="there is no fencing token"),
        lock.atomic(),
    ):
        pytest.fail("the body ran")


@pytest.mark.usefixtures("redis_down")
def test_functions_and_views_follow_the_policy() -> None:
    @locked("name", if_unavailable="skip")
    def skipping() -> None:
        pytest.fail("the body ran")

    @locked_view("name", if_unavailable="local")
    def view(request: HttpRequest) -> HttpResponse:
        inner = RequestFactory().get("/")
        return HttpResponse(status=200 if nested else in_thread(lambda: again(inner)).status_code)

    def again(request: HttpRequest) -> HttpResponse:
        nested.append(True)
        response: HttpResponse = view(request)
        return response

    nested: list[bool] = []
    with pytest.raises(LockNotAcquired):
        skipping()
    assert view(RequestFactory().get("/")).status_code == 409
    assert view(RequestFactory().get("/")).status_code == 200


@pytest.mark.usefixtures("redis_down")
def test_g8_a_forked_child_does_not_hold_the_local_locks_of_its_parent() -> None:
    with Lock("name", if_unavailable="local") as lock:
        pid = os.fork()
        if pid == 0:
            right = False
            try:
                mine = Lock("name", if_unavailable="local")
                right = lock.lost_reason == "fork" and mine.acquire(timeout=0.1)
            finally:
                os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert lock.held
