"""G2: a loss is known at the local deadline at the latest, and reported in every way."""

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
from tests.support.aliases import LONG, TTL, Dlocks, alias, configured
from tests.support.holder import Holder, HolderError
from tests.support.proxy import Proxy


class Recorder:
    """Records everything that is reported about one lock."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.calls: list[str] = []
        self.doubtful, self.renewed = threading.Event(), threading.Event()
        self._called = threading.Event()

    def on_lost(self, lock: Lock, reason: str) -> None:
        self.calls.append(reason)
        self._called.set()

    def receive(self, signal: Any, **facts: Any) -> None:
        if signal is signals.renewed:
            self.renewed.set()
        elif signal is signals.in_doubt:
            self.told.append("in_doubt")
            self.doubtful.set()
        else:
            self.told.append(facts["reason"])

    @property
    def losses(self) -> list[str]:
        """What was told but doubts: on a machine that stalls, a late renewal may come first."""
        return [told for told in self.told if told != "in_doubt"]

    def wait_for_loss(self) -> None:
        assert self._called.wait(30), "no loss was reported"
        assert dispatch.flush(30)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    heard = (signals.renewed, signals.in_doubt, signals.lost)
    for signal in heard:
        signal.connect(recorder.receive)
    yield recorder
    for signal in heard:
        signal.disconnect(recorder.receive)


# -- a paused holder ---------------------------------------------------------------


def test_g2_a_paused_holder_knows_its_loss_at_once_and_its_check_fails(
    dlocks: Dlocks, holder: Holder
) -> None:
    holder.do(
        "lock = Lock('it', on_lost=lambda lock, reason: say('on_lost', reason)); lock.acquire()"
    )
    holder.pause()
    mine = Lock("it", ttl=LONG)
    assert mine.acquire(timeout=20)
    holder.begin("lock.check()")
    holder.resume()
    with pytest.raises(HolderError, match="LeaseLost"):
        holder.answer()
    assert holder.do("lock.state, lock.held, lock.remaining") == ["lost", False, 0.0]
    holder.wait_until_said("lost", "it", "expired")
    holder.wait_until_said("on_lost", "expired")
    # Its late release does not free our lock.
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
    with Lock("it", ttl=LONG, wait=20):
        holder.begin("the line that the block reads")
        holder.resume()
        with pytest.raises(HolderError, match="LeaseLost"):
            holder.answer()


# -- a server that lost its data -------------------------------------------------------

SURE = 2 * TTL
"""A TTL whose first renewal comes in time, although the server has to start again."""


def flush_all(server: RedisServer) -> None:
    with redis.Redis(port=server.port) as admin:
        admin.flushall()


@pytest.mark.parametrize(
    "lose_all",
    [flush_all, RedisServer.restart],
    ids=["FLUSHALL", "an empty restart"],
)
def test_g2_lost_data_is_reported_within_one_interval(
    lose_all: Callable[[RedisServer], None],
    own_redis: RedisServer,
    dlocks: Dlocks,
    recorder: Recorder,
) -> None:
    lock = Lock("it", ttl=SURE, on_lost=recorder.on_lost)
    with pytest.raises(LeaseLost) as caught, lock:
        lose_all(own_redis)
        recorder.wait_for_loss()
        # By the refusal, not by the deadline: a stranger could have acquired in between.
        assert lock.lost_reason == "refused"
    assert caught.value.reason == "refused"
    assert recorder.calls == ["refused"]
    assert recorder.losses == ["refused"]


def test_g2_a_cache_clear_in_the_same_database_is_reported(
    own_redis: RedisServer, recorder: Recorder
) -> None:
    caches = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": own_redis.url,
        }
    }
    options = {"command_timeout": SURE / 3}
    entry = alias("unused", CACHE="default", TTL=SURE, OPTIONS=options)
    del entry["LOCATION"]
    with configured({"default": entry}, CACHES=caches):
        lock = Lock("it", on_lost=recorder.on_lost)
        lock.acquire()
        cache.clear()
        recorder.wait_for_loss()
        assert lock.lost_reason == "refused"
        with pytest.raises(LeaseLost):
            lock.release()


def test_g2_a_fail_over_that_lost_the_lock_is_reported(
    own_redis: RedisServer, through_proxy: Proxy, recorder: Recorder
) -> None:
    lock = Lock("it", ttl=SURE, on_lost=recorder.on_lost)
    with RedisServer() as replica, Proxy("127.0.0.1", replica.port) as successor:
        # Replication is asynchronous: the replica does not have the lock when it is promoted.
        successor.refuse()
        lock.acquire()
        through_proxy.refuse()
        own_redis.kill()
        successor.port = through_proxy.port
        successor.accept()
        recorder.wait_for_loss()
        assert recorder.calls == ["refused"]
        with pytest.raises(LeaseLost):
            lock.release()


def test_g2_a_lock_that_was_flushed_and_taken_is_not_freed_by_its_former_holder(
    own_redis: RedisServer, dlocks: Dlocks, holder: Holder
) -> None:
    lock = Lock("it")
    lock.acquire()
    flush_all(own_redis)
    # Its first connection may take longer than a single attempt.
    holder.do(f"lock = Lock('it', ttl={LONG})")
    assert holder.do("lock.acquire(timeout=20)")
    with pytest.raises(LeaseLost):
        lock.release()
    assert lock.lost_reason == "refused"
    assert Lock("it").locked()
    holder.do("lock.renew()")


# -- a lock that was broken ------------------------------------------------------------


def test_g2_a_broken_lock_is_reported(dlocks: Dlocks, recorder: Recorder) -> None:
    lock = Lock("it", on_lost=recorder.on_lost)
    lock.acquire()
    assert locks["default"].break_("it", owner=lock.owner or "")
    recorder.wait_for_loss()
    assert recorder.calls == ["broken"]
    assert recorder.losses == ["broken"]
    with pytest.raises(LeaseLost):
        lock.check()


# -- a network that is gone ------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_g2_without_a_server_the_loss_is_reported_at_the_deadline(
    how: str, own_redis: RedisServer, dlocks: Dlocks, recorder: Recorder
) -> None:
    lock = Lock("it", on_lost=recorder.on_lost)
    lock.acquire()
    getattr(own_redis, how)()
    recorder.wait_for_loss()
    assert recorder.told == ["in_doubt", "unreachable"]
    assert (lock.state, lock.remaining) == ("lost", 0.0)
    with pytest.raises(LeaseLost):
        lock.check()
    with pytest.raises(LeaseLost):
        lock.release()


def test_g2_a_holder_without_network_knows_its_loss_before_another_can_acquire(
    through_proxy: Proxy, recorder: Recorder
) -> None:
    lock = Lock("it", on_lost=recorder.on_lost)
    lock.acquire()
    through_proxy.black_hole()
    assert Lock("it", using="direct").acquire(timeout=20)
    # Checked at the moment when the stranger acquires, without help from any thread.
    assert lock.lost
    recorder.wait_for_loss()
    assert recorder.calls == ["unreachable"]


def test_g2_a_recovered_server_ends_the_doubt(through_proxy: Proxy, recorder: Recorder) -> None:
    lock = Lock("it", ttl=4 * TTL)
    lock.acquire()
    through_proxy.refuse()
    assert recorder.doubtful.wait(30)
    assert (lock.state, lock.held) == ("in_doubt", True)
    through_proxy.accept()
    assert recorder.renewed.wait(30)
    assert lock.state == "held"
    assert recorder.told == ["in_doubt"]
    lock.release()


def test_g2_the_end_of_a_fixed_lease_is_reported(dlocks: Dlocks, recorder: Recorder) -> None:
    lock = Lock("it", ttl=TTL, renew=False, on_lost=recorder.on_lost)
    lock.acquire()
    end = clock.now() + lock.remaining
    recorder.wait_for_loss()
    assert clock.now() >= end
    assert recorder.calls == ["expired"]
    with pytest.raises(LeaseLost):
        lock.release()


def test_g2_an_error_of_the_body_is_raised_with_a_note_about_the_loss(
    own_redis: RedisServer, dlocks: Dlocks, recorder: Recorder
) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Lock("it", ttl=SURE, on_lost=recorder.on_lost):
        flush_all(own_redis)
        recorder.wait_for_loss()
        raise ZeroDivisionError
    notes: list[str] = getattr(caught.value, "__notes__", ["lost"])
    assert "lost" in notes[0]
    assert recorder.losses == ["refused"]
