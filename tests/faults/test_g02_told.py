"""G2: a loss is known at the local deadline at the latest, and told in every way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core.cache import cache

from django_dlock import LeaseLost, Lock, clock, locks, signals
from django_dlock.core import dispatch
from testproject.servers import RedisServer
from tests.support.aliases import TTL, Dlocks, alias, configured
from tests.support.holder import Holder, HolderError
from tests.support.proxy import Proxy


class Ear:
    """What is told of one lock, as it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.calls: list[str] = []
        self.doubtful, self.renewed = threading.Event(), threading.Event()
        self._called = threading.Event()

    def on_lost(self, lock: Lock, reason: str) -> None:
        self.calls.append(reason)
        self._called.set()

    def hear(self, signal: Any, **facts: Any) -> None:
        if signal is signals.renewed:
            self.renewed.set()
        elif signal is signals.in_doubt:
            self.told.append("in_doubt")
            self.doubtful.set()
        else:
            self.told.append(facts["reason"])

    def wait_for_loss(self) -> None:
        assert self._called.wait(30), "no loss was told"
        assert dispatch.flush(30)


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    heard = (signals.renewed, signals.in_doubt, signals.lost)
    for signal in heard:
        signal.connect(ear.hear)
    yield ear
    for signal in heard:
        signal.disconnect(ear.hear)


# -- a holder that slept ---------------------------------------------------------------


def test_g2_a_paused_holder_is_told_at_once_and_cannot_pass(dlocks: Dlocks, holder: Holder) -> None:
    holder.do(
        "lock = Lock('it', on_lost=lambda lock, reason: say('on_lost', reason)); lock.acquire()"
    )
    holder.pause()
    mine = Lock("it")
    assert mine.acquire(timeout=20)
    holder.begin("lock.check()")
    holder.resume()
    with pytest.raises(HolderError, match="LeaseLost"):
        holder.answer()
    assert holder.do("lock.state, lock.held, lock.remaining") == ["lost", False, 0.0]
    holder.wait_until_said("lost", "it", "expired")
    holder.wait_until_said("on_lost", "expired")
    # Its late release frees nothing of ours.
    with pytest.raises(HolderError, match="LeaseLost"):
        holder.do("lock.release()")
    mine.renew()
    mine.release()


def test_g2_a_paused_holder_leaves_its_block_with_lease_lost(
    dlocks: Dlocks, holder: Holder
) -> None:
    holder.begin("with Lock('it'):\n    say('inside')\n    import sys; sys.stdin.readline()")
    holder.wait_until_said("inside")
    holder.pause()
    with Lock("it", wait=20):
        holder.begin("the line that the block reads")
        holder.resume()
        with pytest.raises(HolderError, match="LeaseLost"):
            holder.answer()


# -- a server that lost its data -------------------------------------------------------


def flush_all(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as admin:
        admin.flushall()


@pytest.mark.parametrize(
    "lose_all",
    [flush_all, RedisServer.restart],
    ids=["FLUSHALL", "an empty restart"],
)
def test_g2_lost_data_is_told_within_one_interval(
    lose_all: Callable[[RedisServer], None], own_redis: RedisServer, dlocks: Dlocks, ear: Ear
) -> None:
    with pytest.raises(LeaseLost) as caught, Lock("it", on_lost=ear.on_lost) as lock:
        lose_all(own_redis)
        ear.wait_for_loss()
        # By the refusal and not by the deadline, before which a stranger could have come.
        assert lock.lost_reason == "refused"
    assert caught.value.reason == "refused"
    assert ear.calls == ["refused"]
    assert ear.told == ["refused"]


def test_g2_a_cache_clear_in_the_same_database_is_told(own_redis: RedisServer, ear: Ear) -> None:
    caches = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": own_redis.url,
        }
    }
    entry = alias("unused", CACHE="default")
    del entry["LOCATION"]
    with configured({"default": entry}, CACHES=caches):
        lock = Lock("it", on_lost=ear.on_lost)
        lock.acquire()
        cache.clear()
        ear.wait_for_loss()
        assert lock.lost_reason == "refused"
        with pytest.raises(LeaseLost):
            lock.release()


def test_g2_a_fail_over_that_lost_the_lock_is_told(
    own_redis: RedisServer, through_proxy: Proxy, ear: Ear
) -> None:
    lock = Lock("it", on_lost=ear.on_lost)
    with RedisServer() as replica, Proxy("127.0.0.1", replica.port) as successor:
        # Asynchronous replication: the replica has not heard of the lock when it is promoted.
        successor.refuse()
        lock.acquire()
        through_proxy.refuse()
        own_redis.kill()
        successor.port = through_proxy.port
        successor.accept()
        ear.wait_for_loss()
        assert ear.calls == ["refused"]
        with pytest.raises(LeaseLost):
            lock.release()


def test_g2_a_lock_that_was_flushed_and_taken_is_not_freed_by_its_former_holder(
    own_redis: RedisServer, dlocks: Dlocks, holder: Holder
) -> None:
    lock = Lock("it")
    lock.acquire()
    flush_all(own_redis)
    holder.do("lock = Lock('it'); lock.acquire(blocking=False)")
    with pytest.raises(LeaseLost):
        lock.release()
    assert lock.lost_reason == "refused"
    assert Lock("it").locked()
    holder.do("lock.renew()")


# -- a lock that was broken ------------------------------------------------------------


def test_g2_a_broken_lock_is_told(dlocks: Dlocks, ear: Ear) -> None:
    lock = Lock("it", on_lost=ear.on_lost)
    lock.acquire()
    assert locks["default"].break_("it", owner=lock.owner or "")
    ear.wait_for_loss()
    assert ear.calls == ear.told == ["broken"]
    with pytest.raises(LeaseLost):
        lock.check()


# -- a network that is gone ------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_g2_without_a_server_the_deadline_is_told(
    how: str, own_redis: RedisServer, dlocks: Dlocks, ear: Ear
) -> None:
    lock = Lock("it", on_lost=ear.on_lost)
    lock.acquire()
    getattr(own_redis, how)()
    ear.wait_for_loss()
    assert ear.told == ["in_doubt", "unreachable"]
    assert (lock.state, lock.remaining) == ("lost", 0.0)
    with pytest.raises(LeaseLost):
        lock.check()
    with pytest.raises(LeaseLost):
        lock.release()


def test_g2_a_black_holed_holder_knows_its_loss_before_a_stranger_can_enter(
    through_proxy: Proxy, ear: Ear
) -> None:
    lock = Lock("it", on_lost=ear.on_lost)
    lock.acquire()
    through_proxy.black_hole()
    assert Lock("it", using="direct").acquire(timeout=20)
    # Asked at the very moment of the stranger's entry, and without any thread's help.
    assert lock.lost
    ear.wait_for_loss()
    assert ear.calls == ["unreachable"]


def test_g2_a_recovered_server_takes_the_doubt_away(through_proxy: Proxy, ear: Ear) -> None:
    lock = Lock("it", ttl=4 * TTL)
    lock.acquire()
    through_proxy.refuse()
    assert ear.doubtful.wait(30)
    assert (lock.state, lock.held) == ("in_doubt", True)
    through_proxy.accept()
    assert ear.renewed.wait(30)
    assert lock.state == "held"
    assert ear.told == ["in_doubt"]
    lock.release()


def test_g2_a_fixed_lease_tells_its_end(dlocks: Dlocks, ear: Ear) -> None:
    lock = Lock("it", ttl=TTL, renew=False, on_lost=ear.on_lost)
    lock.acquire()
    end = clock.now() + lock.remaining
    ear.wait_for_loss()
    assert clock.now() >= end
    assert ear.calls == ["expired"]
    with pytest.raises(LeaseLost):
        lock.release()


def test_g2_an_error_of_the_body_is_told_along_with_the_loss(
    own_redis: RedisServer, dlocks: Dlocks, ear: Ear
) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Lock("it", on_lost=ear.on_lost):
        flush_all(own_redis)
        ear.wait_for_loss()
        raise ZeroDivisionError
    notes: list[str] = getattr(caught.value, "__notes__", ["lost"])
    assert "lost" in notes[0]
    assert ear.told == ["refused"]
