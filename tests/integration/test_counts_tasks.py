"""What a locked task costs, counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from celery import Celery

from django_dlock import Lock
from testproject.servers import RedisServer
from tests.deliveries import in_memory, task, work
from tests.faults.aliases import alias, configured
from tests.proxy import Proxy

DLOCK_THREADS = {"dlock-watchdog", "dlock-events", "dlock-undo", "dlock-connect"}


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


def test_a_locked_task_runs_for_two_commands_on_the_connection_that_is_there(
    app: Celery, proxy: Proxy
) -> None:
    made = task(app, nothing, lock_key="order:{order}")
    passed, connections = len(proxy.commands), proxy.connections
    for order in range(5):
        made.delay(order)
        work(app)
    assert proxy.commands[passed:] == ["EVALSHA", "EVALSHA"] * 5
    assert proxy.connections == connections


def test_a_locked_task_leaves_no_thread_of_its_own(app: Celery) -> None:
    made = task(app, nothing, lock_key="order:{order}")
    before = set(threading.enumerate())
    for order in range(5):
        made.delay(order)
        work(app)
    new = [thread.name for thread in set(threading.enumerate()) - before]
    assert set(new) <= DLOCK_THREADS
    assert new.count("dlock-watchdog") <= 1
