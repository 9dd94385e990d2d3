"""How many connections threads use, which call gets one first, and that none is ever lost."""

from __future__ import annotations

import collections
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_dlock import clock
from django_dlock.backends.redis import pool as pool_module
from django_dlock.backends.redis.connection import Connection
from django_dlock.backends.redis.pool import ORDINARY, URGENT, Pool
from django_dlock.backends.redis.route import Route
from django_dlock.backends.shared.pool import NoSlot
from django_dlock.backends.slots import Slot
from django_dlock.exceptions import BackendUnavailable
from testproject.servers import RedisServer
from tests.support.points import heard
from tests.support.proxy import Proxy
from tests.support.redis_calls import (
    backend_for,
    client,
    free_slots,
    grant,
    idle_connection,
    pool_of,
    release,
    renew,
    request,
)

LIMIT = 4
"""One of them is reserved for urgent calls."""


@pytest.fixture
def pool(own_redis: RedisServer) -> Iterator[Pool]:
    backend = backend_for(own_redis.url, options={"max_connections": LIMIT})
    yield pool_of(backend)
    backend.close()


def soon() -> float:
    return clock.now() + 10


def take_ordinary(pool: Pool) -> list[Slot]:
    """Take all connections that a call without urgency may have."""
    return [pool.take(ORDINARY, soon()) for _ in range(LIMIT - 1)]


def start(function: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


# -- how many --------------------------------------------------------------------------


def test_threads_with_different_names_share_a_few_connections(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, options={"max_connections": LIMIT}, command_timeout=20.0)
    together = threading.Barrier(200)
    outcomes: list[str] = []

    def cycle(number: int) -> None:
        together.wait()
        outcomes.append(release(backend, grant(backend, request(f"it:{number}"))))

    threads = [start(cycle, number) for number in range(200)]
    for thread in threads:
        thread.join()
    assert outcomes == ["released"] * 200
    assert 2 <= proxy.connections <= LIMIT
    backend.close()


def test_by_default_there_are_at_most_32_connections(own_redis: RedisServer) -> None:
    pool = pool_of(backend_for(own_redis.url))
    slots = [pool.take(URGENT, soon()) for _ in range(32)]
    with pytest.raises(NoSlot, match="no connection was free"):
        pool.take(URGENT, clock.now())
    assert len(set(map(id, slots))) == 32


# -- which call gets one ----------------------------------------------------------------------


def test_g6_a_lease_is_renewed_and_released_while_others_use_all_connections(
    own_redis: RedisServer,
) -> None:
    backend = backend_for(own_redis.url, options={"max_connections": LIMIT}, command_timeout=10.0)
    lease = grant(backend, request())
    slots = take_ordinary(pool_of(backend))
    waiting = [
        start(lambda name: release(backend, grant(backend, request(name))), f"it:{number}")
        for number in range(20)
    ]
    with pytest.raises(NoSlot):
        pool_of(backend).take(ORDINARY, clock.now())
    assert [*renew(backend, lease), release(backend, lease)] == ["renewed", "released"]
    assert all(thread.is_alive() for thread in waiting)
    for slot in slots:
        slot.release()
    for thread in waiting:
        thread.join()
    backend.close()


def test_an_urgent_call_takes_any_free_connection(pool: Pool) -> None:
    slots = [pool.take(URGENT, soon()) for _ in range(LIMIT)]
    assert free_slots(pool) == 0
    taken: list[Slot] = []
    waiter = start(lambda: taken.append(pool.take(URGENT, soon())))
    # It waits for the connection that is reserved for urgent calls.
    slots.pop().release()
    waiter.join()
    assert len(taken) == 1


def test_an_urgent_call_that_waits_is_served_by_an_ordinary_connection(pool: Pool) -> None:
    urgent = [pool.take(URGENT, soon()) for _ in range(LIMIT)]
    taken: list[Slot] = []
    with heard("pool.waiting") as waiting:
        waiter = start(lambda: taken.append(pool.take(URGENT, soon())))
        waiting.wait()
    # Ordinary ones are taken first.
    urgent.pop(0).release()
    waiter.join()
    assert len(taken) == 1


# -- in time ---------------------------------------------------------------------------


# Without an error, the call would wait forever.
@pytest.mark.timeout(50)
def test_g10_a_call_that_gets_no_connection_in_time_fails(own_redis: RedisServer) -> None:
    backend = backend_for(own_redis.url, options={"max_connections": LIMIT}, command_timeout=60.0)
    slots = take_ordinary(pool_of(backend))
    started = clock.now()
    with pytest.raises(BackendUnavailable, match="no connection was free"):
        backend.acquire(request(), deadline=started + 0.2)
    assert 0.1 <= clock.now() - started < 30
    slots.pop().release()
    assert grant(backend, request())


# -- never lost ------------------------------------------------------------------------


def test_g7_a_slot_that_an_interrupt_drops_is_replaced(pool: Pool) -> None:
    slots = take_ordinary(pool)
    taken: list[Slot] = []
    waiter = start(lambda: taken.append(pool.take(ORDINARY, soon())))
    # As if it was dropped from the stack of a thread interrupted between two steps.
    slots.clear()
    waiter.join()
    assert len(taken) == 1
    assert free_slots(pool) == LIMIT - 1


def test_g8_a_child_has_all_slots_and_none_of_its_parents_connections(
    own_redis: RedisServer,
) -> None:
    backend = backend_for(own_redis.url, options={"max_connections": LIMIT})
    grant(backend, request())
    pool = pool_of(backend)
    slots = take_ordinary(pool)
    assert idle_connection(backend).is_reusable
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            backend.after_fork()
            for slot in slots:
                slot.release()
            slots.clear()
            status = 0 if free_slots(pool) == LIMIT and pool.take_idle() is None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    slots.clear()
    assert renew(backend, grant(backend, request("on the same connection")))
    backend.close()


def test_failed_connections_are_closed_explicitly(
    proxy: Proxy, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a forked child, the garbage collector would close it with a warning.
    made: weakref.WeakSet[Connection] = weakref.WeakSet()

    class Known(Connection):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.add(self)

    monkeypatch.setattr(pool_module, "Connection", Known)
    backend = backend_for(proxy.url, options={"max_connections": LIMIT}, command_timeout=2.0)

    def fails() -> bool:
        try:
            return release(backend, grant(backend, request())) != "released"
        except BackendUnavailable:
            return True

    gc.disable()
    try:
        proxy.drop_replies(1000, how="close")
        assert fails()
        proxy.refuse()
        assert fails()
        proxy._drops.clear()
        proxy.accept()
        # One server that does not know the script, and one that refuses the command.
        assert not fails()
        with client(own_redis) as asking:
            asking.config_set("maxmemory", "1")
        assert fails()
        backend.close()
        assert not made
    finally:
        gc.enable()


def test_a_connection_that_failed_is_not_used_again(proxy: Proxy) -> None:
    backend = backend_for(proxy.url, options={"max_connections": LIMIT}, command_timeout=2.0)
    lease = grant(backend, request())
    for _ in range(LIMIT + 1):
        proxy.drop_replies(how="swallow")
        with pytest.raises(BackendUnavailable):
            renew(backend, lease)
    assert renew(backend, lease) == ["renewed"]
    assert free_slots(pool_of(backend)) == LIMIT
    backend.close()


@pytest.mark.parametrize("fails", [False, True])
def test_g10_an_attempt_that_ends_when_its_caller_gives_up_serves_the_next_caller(own_redis, fails):
    class Late(collections.deque):
        """Makes the attempt end while its caller hands it on."""

        def append(self, attempt):
            answered.set()
            attempt.join(20)
            super().append(attempt)

    answered, failures = threading.Event(), [OSError("no such host")] if fails else []

    class LateRoute(Route):
        def __call__(self):
            connection = redis.Connection(port=urlsplit(own_redis.url).port)
            connect = connection.connect

            def connect_late():
                answered.wait(20)
                if failures:
                    raise failures.pop()
                connect()

            connection.connect = connect_late
            return connection

    pool = Pool(LateRoute(redis.ConnectionPool(), {}, ()), LIMIT)
    pool._connector._late = Late()
    with pytest.raises(RedisTimeoutError):
        pool.connect(clock.now())
    connections = [pool.connect(clock.now() + 20) for _ in range(2)]
    assert connections[0] is not connections[1]
    for connection in connections:
        connection.close()
