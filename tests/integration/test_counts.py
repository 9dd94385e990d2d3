"""Counts of commands on the wire and of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_dlock import Lock, locks, signals
from testproject.servers import RedisServer
from tests.support.aliases import LONG, alias, another, configured
from tests.support.proxy import Proxy

pytestmark = pytest.mark.extended

LEASE = 6.0
"""Seconds; within a third of it, a busy machine can acquire hundreds of locks."""


@pytest.fixture
def counted(own_redis: RedisServer, proxy: Proxy) -> Iterator[Proxy]:
    """The proxy through which ``default`` connects; ``direct`` does not use it."""
    # A command that is not answered in time would be repeated.
    patient = {"command_timeout": LEASE / 3}
    entries = {
        "default": alias(proxy.url, TTL=LEASE, OPTIONS=patient),
        "direct": alias(own_redis.url, TTL=LONG, OPTIONS={"command_timeout": LONG / 6}),
    }
    with configured(entries):
        # Connect and load the scripts.
        with Lock("warm"):
            pass
        yield proxy


def calls(own_redis: RedisServer) -> dict[str, int]:
    """How often each command was called outside of scripts."""
    with redis.Redis(port=own_redis.port) as admin:
        stats = admin.info("commandstats")
    return {name: stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval")}


def test_an_uncontended_acquire_and_release_are_two_commands(
    counted: Proxy, own_redis: RedisServer
) -> None:
    passed, connections = len(counted.commands), counted.connections
    before = calls(own_redis)
    # Not renewed meanwhile.
    lock = Lock("it", ttl=LONG)
    assert lock.acquire()
    # One command is one round trip, although the watchdog is started.
    assert counted.commands[passed:] == ["EVALSHA"]
    assert any(thread.name == "dlock-watchdog" for thread in threading.enumerate())
    lock.release()
    assert counted.commands[passed:] == ["EVALSHA", "EVALSHA"]
    assert counted.connections == connections
    after = calls(own_redis)
    assert (after["evalsha"] - before["evalsha"], after["eval"]) == (2, before["eval"])


class Renewals:
    """Counts the signals."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def receive(self, **facts: Any) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, 40), self._count

    def wait_for_more(self, count: int) -> None:
        self.wait_for(self._count + count)


@pytest.fixture
def renewals() -> Iterator[Renewals]:
    counter = Renewals()
    signals.renewed.connect(counter.receive)
    yield counter
    signals.renewed.disconnect(counter.receive)


def test_one_round_trip_renews_500_leases(counted: Proxy, renewals: Renewals) -> None:
    held = [Lock(f"it:{number}") for number in range(500)]
    for lock in held:
        assert lock.acquire(blocking=False)
    # Its first use loads the script, which takes an extra round trip.
    renewals.wait_for(500)
    # On a busy machine they are acquired over several seconds, and renewed in two parts at first.
    for _ in range(5):
        passed = len(counted.commands)
        renewals.wait_for_more(500)
        if counted.commands[passed:] == ["EVALSHA"]:
            break
    else:
        pytest.fail("no round trip renewed 500 leases")
    for lock in held:
        lock.release()


def test_a_waiter_of_five_seconds_sends_at_most_five_commands(counted: Proxy) -> None:
    with Lock("it", using="direct", ttl=30):
        passed = counted.count("EVALSHA", "SUBSCRIBE", "PING")
        assert not Lock("it").acquire(timeout=5)
        assert counted.count("EVALSHA", "SUBSCRIBE", "PING") - passed <= 5


def hand_over(counted: Proxy, passed: int, asks: int) -> Lock:
    """Let a waiter ask so often, then release; return its lock once it holds it."""
    holder = Lock("it", using="direct", bound=False)
    holder.acquire()
    # Not renewed meanwhile.
    waiter = Lock("it", ttl=LONG, bound=False)
    thread = threading.Thread(target=waiter.acquire)
    thread.start()
    counted.wait_until(lambda proxy: proxy.commands[passed:].count("EVALSHA") == asks)
    direct = locks["direct"]
    while (info := direct.get("it")) is None or not info.waiting:
        pass
    holder.release()
    thread.join()
    return waiter


def test_a_waiter_sends_one_command_and_gets_the_lease(counted: Proxy) -> None:
    # The first wait of a process subscribes on a separate connection, and asks again.
    passed = len(counted.commands)
    hand_over(counted, passed, 2).release()
    commands = [name for name in counted.commands[passed:] if name != "CLIENT"]
    assert commands == ["EVALSHA", "SUBSCRIBE", "EVALSHA", "EVALSHA"]
    passed = len(counted.commands)
    waiter = hand_over(counted, passed, 1)
    assert counted.commands[passed:] == ["EVALSHA"]
    waiter.release()
    assert counted.commands[passed:] == ["EVALSHA", "EVALSHA"]


def test_one_thread_and_two_connections_renew_a_thousand_locks(counted: Proxy) -> None:
    left = {thread for thread in threading.enumerate() if thread.name != "dlock-watchdog"}
    held = [Lock(f"it:{number}") for number in range(1000)]
    for lock in held:
        assert lock.acquire(blocking=False)
    with another(counted, commands=9):
        pass
    # Other tests may have left acquires to be cancelled at a dead server. Their threads connect
    # again and again, and renew nothing.
    ours = [
        thread.name
        for thread in set(threading.enumerate()) - left
        if thread.name.startswith("dlock-")
        and thread.name not in ("dlock-connect", "dlock-cleanup")
    ]
    assert ours.count("dlock-watchdog") == 1
    # A separate thread sends a batch that is too large to be sent without blocking.
    assert set(ours) <= {"dlock-watchdog", "dlock-log", "dlock-supervisor", "dlock-call"}
    assert len(ours) <= 4
    assert counted.connections <= 2
    assert all(lock.held for lock in held)


def test_an_unreachable_alias_loses_no_lock_of_another_alias(proxy: Proxy) -> None:
    slow: dict[str, Any] = {"TTL": LEASE, "OPTIONS": {"command_timeout": LEASE / 3}}
    with (
        RedisServer() as other,
        # Long enough for a busy machine to renew 500 leases in time.
        configured({"default": alias(proxy.url, **slow), "other": alias(other.url, **slow)}),
    ):
        hung = [Lock(f"it:{number}") for number in range(500)]
        well = [Lock(f"it:{number}", using="other") for number in range(500)]
        for lock in hung + well:
            assert lock.acquire(blocking=False)
        proxy.black_hole()
        assert not Lock("it:0", using="other", bound=False).acquire(timeout=2 * LEASE)
        assert sum(lock.lost for lock in hung) == 500
        assert sum(lock.lost for lock in well) == 0
        infos = locks["other"].list()
        assert len(infos) == 500
        assert min(info.renewals for info in infos) >= 3
