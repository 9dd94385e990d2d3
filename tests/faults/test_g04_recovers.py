"""G4: the lock of a dead holder is free soon, and that of a living one is not."""

from __future__ import annotations

import pytest

from django_dlock import Lock, clock, signals
from django_dlock.core import dispatch
from testproject.servers import RedisServer
from tests.faults.conftest import NewHolder
from tests.support.aliases import LONG, TTL, Dlocks, alias, configured
from tests.support.faketime import SteppedClock
from tests.support.holder import Holder
from tests.support.proxy import Proxy

SLACK = 10.0
"""Seconds; long enough for a busy machine."""

HOLD = f"lock = Lock('it', ttl={LONG}); lock.acquire()"

ELSEWHERE = """
import dataclasses
from django_dlock import process
process.identity._current = process.current()._replace(boot_id="of another machine")
"""
"""Makes a holder look as if it ran on another machine, where this one can prove nothing."""


def test_g4_a_killed_holders_lock_is_free_after_its_ttl(dlocks: Dlocks, holder: Holder) -> None:
    holder.do(ELSEWHERE)
    holder.do("lock = Lock('it'); lock.acquire()")
    holder.kill()
    killed_at = clock.now()
    assert Lock("it").acquire(timeout=TTL + 1 + SLACK)
    assert clock.now() - killed_at <= TTL + 1 + SLACK


def test_g4_a_waiter_on_the_same_machine_gets_the_lock_of_a_killed_holder_within_a_second(
    proxy: Proxy, new_holder: NewHolder
) -> None:
    holder, waiter = new_holder(), new_holder(dlocks={"default": alias(proxy.url)})
    holder.do(HOLD)
    # It starts, and connects for the first time.
    waiter.do("with Lock('warm', wait=30): pass")
    waiter.begin(f"waiter = Lock('it', ttl={LONG}); waiter.acquire(timeout={LONG})")
    # The waiter has met the living holder, and blocks.
    proxy.wait_until(lambda proxy: bool(proxy.count("SUBSCRIBE")), 30)
    holder.kill()
    waiter.answer(timeout=1 + SLACK)
    assert waiter.do("waiter.held")


@pytest.mark.parametrize("how", ["kill", "kill_unreaped"])
def test_g4_a_new_caller_gets_the_lock_of_a_dead_holder_at_once(
    how: str, dlocks: Dlocks, holder: Holder
) -> None:
    told: list[str] = []

    def receive(reason: str, **facts: object) -> None:
        told.append(reason)

    holder.do(HOLD)
    getattr(holder, how)()
    signals.broken.connect(receive)
    try:
        # A single attempt, which on a busy machine may take long.
        with configured({"default": dlocks["direct"]}), Lock("it", wait=0):
            pass
        assert dispatch.flush(30)
    finally:
        signals.broken.disconnect(receive)
    assert told == ["holder_dead"]


def test_g4_a_stopped_holder_is_not_dead(dlocks: Dlocks, holder: Holder) -> None:
    holder.do(HOLD)
    holder.pause()
    assert not Lock("it").acquire(timeout=1.5)
    holder.resume()
    assert holder.do("lock.held")
    holder.do("lock.release()")


def test_g4_a_holder_on_another_machine_is_not_declared_dead(
    dlocks: Dlocks, holder: Holder
) -> None:
    holder.do(ELSEWHERE)
    holder.do(HOLD)
    holder.kill()
    assert not Lock("it").acquire(timeout=1.5)


def test_g4_a_process_that_ends_normally_leaves_nothing_behind(
    dlocks: Dlocks, holder: Holder
) -> None:
    holder.do(HOLD)
    assert holder.end() == 0
    assert not Lock("it").locked()


def test_g4_several_dead_holders_in_a_row_block_nobody(
    dlocks: Dlocks, new_holder: NewHolder
) -> None:
    for _ in range(3):
        holder = new_holder()
        holder.do(HOLD)
        assert holder.do("lock.held")
        holder.kill()
    assert Lock("it").acquire(timeout=LONG / 3)


def test_g4_a_step_back_of_the_servers_clock_does_not_keep_a_dead_holders_lock(
    stepped_server: RedisServer, stepped_clock: SteppedClock
) -> None:
    with configured({"default": alias(stepped_server.url)}):
        lost = Lock("it", ttl=TTL, renew=False)
        lost.acquire()
        stepped_clock.step("-2h")
        assert Lock("it", bound=False).acquire(timeout=TTL + 1 + SLACK)
