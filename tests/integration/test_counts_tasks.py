"""The cost of a locked task and of a thousand waiting threads, as counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from celery import Celery

from django_dlock import Lock, clock, locks
from django_dlock.backends.redis.config import RedisOptions
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured
from tests.support.deliveries import in_memory, task, work
from tests.support.proxy import Proxy
from tests.support.workers import eventually

CROWD = 1000
DLOCK_THREADS = {
    *("dlock-watchdog", "dlock-log", "dlock-supervisor", "dlock-cleanup", "dlock-connect"),
}


@pytest.fixture
def app(own_redis: RedisServer, proxy: Proxy) -> Iterator[Celery]:
    """Messages in memory, locks behind the proxy."""
    slow = {"TTL": 30.0, "OPTIONS": {"command_timeout": 5.0}}
    with in_memory() as app, configured({"default": alias(proxy.url, **slow)}):
        with Lock("warm"):
            pass
        yield app


def nothing(self: object, order: int) -> None:
    """A body."""


def test_a_locked_task_takes_two_commands_on_an_open_connection(app: Celery, proxy: Proxy) -> None:
    made = task(app, nothing, lock_key="order:{order}")
    passed, connections = len(proxy.commands), proxy.connections
    for order in range(5):
        made.delay(order)
        work(app)
    assert proxy.commands[passed:] == ["EVALSHA", "EVALSHA"] * 5
    assert proxy.connections == connections


def test_a_locked_task_leaves_no_thread_behind(app: Celery) -> None:
    made = task(app, nothing, lock_key="order:{order}")
    before = set(threading.enumerate())
    for order in range(5):
        made.delay(order)
        work(app)
    new = [thread.name for thread in set(threading.enumerate()) - before]
    assert set(new) <= DLOCK_THREADS
    assert new.count("dlock-watchdog") <= 1


@pytest.mark.timeout(400)
def test_a_thousand_threads_that_wait_for_different_names_share_few_connections(
    own_redis: RedisServer,
) -> None:
    # No time is measured: all of them together may take long on a busy machine.
    patient = alias(own_redis.url, TTL=180.0, OPTIONS={"command_timeout": 60.0})
    with (
        configured({"default": patient, "holder": patient}),
        redis.Redis(port=own_redis.port) as asking,
    ):
        held = [Lock(f"it:{number}", using="holder", bound=False) for number in range(CROWD)]
        for lock in held:
            assert lock.acquire(blocking=False)
        before, most = len(asking.client_list()), 0
        acquired: list[str] = []
        errors: list[Exception] = []

        def wait(name: str) -> None:
            try:
                with Lock(name, wait=600):
                    acquired.append(name)
            except Exception as error:
                errors.append(error)

        # Daemon threads, so that they end if the test fails.
        threads = [threading.Thread(target=wait, args=(lock.name,), daemon=True) for lock in held]
        for thread in threads:
            thread.start()

        def all_wait() -> bool:
            nonlocal most
            most = max(most, len(asking.client_list()) - before)
            assert errors == []
            return sum(info.waiting for info in locks["holder"].list(prefix="it:")) == CROWD

        eventually(all_wait, patience=120)
        for lock in held:
            lock.release()
        end = clock.now() + 120
        for thread in threads:
            thread.join(max(0.0, end - clock.now()))
        most = max(most, len(asking.client_list()) - before)
        assert errors == []
        assert sorted(acquired) == sorted(lock.name for lock in held)
        # The pool's, the listener's and the watchdog's.
        assert most <= RedisOptions().max_connections + 2
