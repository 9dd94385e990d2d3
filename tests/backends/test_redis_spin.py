"""Replies are polled for only where polling is faster than sleeping until they come."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from django_dlock import clock
from django_dlock.backends.redis import connection, polling
from django_dlock.backends.redis.connection import Connection
from django_dlock.backends.redis.polling import NEAR, TRY_EVERY, Spin, poller
from testproject.servers import RedisServer
from tests.support.redis_calls import (
    backend_for,
    grant,
    idle_connection,
    pool_of,
    release,
    renewals,
    request,
)

PATIENCE = 10.0
SETTLED = 20 * TRY_EVERY
"""Replies after which the averages are based on enough samples."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield ours, its


def choices(spin: Spin, count: int, *, polled: float, slept: float) -> list[bool]:
    """For which replies it polls, given these durations of a round trip."""
    chosen = []
    for _ in range(count):
        chosen.append(spin.polls())
        spin.took(polled if chosen[-1] else slept, polled=chosen[-1])
    return chosen


# -- servers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        (("127.0.0.1", 6379), True),
        (("127.8.9.10", 6379), True),
        (("::1", 6379, 0, 0), True),
        (("10.0.0.1", 6379), False),
        (("192.0.2.7", 6379), False),
        (("2001:db8::1", 6379, 0, 0), False),
    ],
)
def test_only_servers_on_this_machine_are_polled(ends, address, is_local):
    ours, _ = ends
    sock = SimpleNamespace(family=socket.AF_INET, getpeername=lambda: address, fileno=ours.fileno)
    assert (poller(sock) is not None) is is_local


def test_a_unix_socket_is_polled(ends):
    assert poller(ends[0]) is not None


def test_nothing_is_polled_if_greenlets_replace_threads(ends, monkeypatch):
    class Theirs:
        """As gevent's."""

    monkeypatch.setattr(select, "poll", Theirs)
    assert poller(ends[0]) is None
    monkeypatch.delattr(select, "poll")
    assert poller(ends[0]) is None


# -- measurements --------------------------------------------------------------------------------


def test_polling_continues_while_it_is_faster():
    chosen = choices(Spin(), 10 * TRY_EVERY, polled=0.6 * NEAR, slept=1.2 * NEAR)
    assert chosen.count(False) == 10


@pytest.mark.parametrize(
    ("polled", "slept"),
    [(3.0, 3.0), (1.1, 2.0), (0.6, 0.7), (0.6, 0.5)],
    ids=["a slow server", "a server that is no near one", "hardly a gain", "a loss"],
)
def test_replies_are_seldom_polled_for_if_that_is_not_faster(polled, slept):
    spin = Spin()
    choices(spin, SETTLED, polled=polled * NEAR, slept=slept * NEAR)
    chosen = choices(spin, 100 * TRY_EVERY, polled=polled * NEAR, slept=slept * NEAR)
    assert chosen.count(True) <= 100


def test_one_slow_reply_does_not_end_polling():
    spin = Spin()
    choices(spin, SETTLED, polled=0.6 * NEAR, slept=1.2 * NEAR)
    spin.took(100 * NEAR, polled=True)
    assert choices(spin, 100, polled=0.6 * NEAR, slept=1.2 * NEAR).count(True) >= 99


def test_a_changed_round_trip_time_is_noticed():
    spin = Spin()
    choices(spin, SETTLED, polled=3 * NEAR, slept=3 * NEAR)
    choices(spin, SETTLED, polled=0.6 * NEAR, slept=1.2 * NEAR)
    assert choices(spin, 100, polled=0.6 * NEAR, slept=1.2 * NEAR).count(True) >= 99


# -- the polling ---------------------------------------------------------------------------------


def test_polling_ends_when_the_reply_comes(ends, monkeypatch):
    ours, its = ends
    polled = []

    def now() -> float:
        polled.append(1)
        if len(polled) == 3:
            its.sendall(b"+OK\r\n")
        return 0.0

    monkeypatch.setattr(polling, "perf_counter", now)
    poll = poller(ours)
    assert poll is not None
    poll()
    assert len(polled) == 3


def test_polling_ends_when_no_reply_comes(ends):
    poll = poller(ends[0])
    assert poll is not None
    started = clock.now()
    poll()
    assert clock.now() - started < PATIENCE


@pytest.mark.parametrize("error", [AttributeError, KeyboardInterrupt, RuntimeError, ValueError])
def test_an_exception_of_a_signal_handler_during_polling_reaches_the_caller(
    own_redis, error, monkeypatch
):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())

    def interrupted() -> float:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Spin, "polls", lambda self: True)
        patched.setattr(polling, "perf_counter", interrupted)
        with pytest.raises(error):
            release(backend, lease)
    assert pool_of(backend).take_idle() is None
    assert release(backend, lease) == "released"


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each timed round trip, whether its reply was polled for."""
    timed: list[bool] = []
    took = Spin.took

    def noted(self: Spin, seconds: float, *, polled: bool) -> None:
        timed.append(polled)
        took(self, seconds, polled=polled)

    monkeypatch.setattr(Spin, "took", noted)
    monkeypatch.setattr(Spin, "polls", lambda self: True)
    return timed


def test_the_reply_to_every_call_is_polled_for(own_redis, round_trips):
    backend = backend_for(own_redis.url)
    # The server does not have the scripts yet.
    release(backend, grant(backend, request()))
    round_trips.clear()
    release(backend, grant(backend, request()))
    assert round_trips == [True, True]


def test_a_renewal_sent_ahead_is_not_polled_for(own_redis, round_trips):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    round_trips.clear()
    pending = backend.start_renew(renewals(lease), process="p", deadline=backend.call_deadline())
    assert pending.result()[0].outcome == "renewed"
    assert round_trips == []


def test_a_server_on_another_machine_is_not_polled(own_redis: RedisServer, monkeypatch: Any):
    monkeypatch.setattr(connection, "poller", lambda sock: None)
    monkeypatch.setattr(Spin, "polls", lambda self: pytest.fail("asked"))
    backend = backend_for(own_redis.url)
    assert release(backend, grant(backend, request())) == "released"
    assert type(idle_connection(backend)) is Connection
