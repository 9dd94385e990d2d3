"""G4: waiters that die, or stop, cost those behind them nothing, or one TTL."""

from __future__ import annotations

import threading

import pytest

from django_dlock import Lock, clock, locks
from testproject.servers import RedisServer
from tests.faults.conftest import NewHolder
from tests.support.aliases import LONG, Dlocks, alias, configured
from tests.support.holder import PATIENCE, Holder

SOON = 10.0
TTL = 4.0


def listening(holder: Holder) -> Holder:
    """Let it listen, and so ask once: one that asks again meets who has the name by then."""
    with Lock("warm", ttl=LONG):
        assert not holder.do("Lock('warm').acquire(timeout=0.1)")
    return holder


def waiting(holder: Holder, count: int, ttl: float = LONG) -> Holder:
    """Let it wait, so that so many do."""
    listening(holder)
    holder.begin(f"lock = Lock('it', ttl={ttl}); lock.acquire(timeout={LONG})")
    end = clock.now() + PATIENCE
    while (info := locks["default"].get("it")) is None or info.waiting < count:
        assert clock.now() < end
    return holder


@pytest.fixture
def held(dlocks: Dlocks) -> Lock:
    lock = Lock("it", ttl=LONG, bound=False)
    lock.acquire()
    return lock


def test_g4_a_killed_first_waiter_is_passed_over_at_once(held: Lock, new_holder: NewHolder) -> None:
    first, second = waiting(new_holder(), 1), waiting(new_holder(), 2)
    first.kill()
    held.release()
    second.answer(timeout=SOON)
    assert second.do("lock.held")


def test_g4_a_stopped_first_waiter_costs_its_ttl_and_believes_no_old_message(
    dlocks: Dlocks, new_holder: NewHolder
) -> None:
    with Lock("it", ttl=TTL) as held:
        first = waiting(new_holder(), 1, TTL)
        second = waiting(new_holder(), 2, TTL)
        third = waiting(new_holder(), 3, TTL)
        first.pause()
        assert held.held
    # Whichever of them asks first when the lease has expired.
    answered = next_of(second, third)
    answered.answer()
    assert answered.do("lock.held")
    first.resume()
    # It reads now that the lease was handed to it.
    assert answered.do("lock.renew(), lock.held") == [None, True]
    assert not first.answered
    token = answered.do("lock.token")
    answered.do("lock.release()")
    for _ in range(2):
        other = next_of(*({first, second, third} - {answered}))
        other.answer()
        assert other.do("lock.held")
        assert other.do("lock.token") > token
        token = other.do("lock.token")
        other.do("lock.release()")


def next_of(*holders: Holder) -> Holder:
    """The one that answers first."""
    end = clock.now() + PATIENCE
    while clock.now() < end:
        for holder in holders:
            if holder.answered:
                return holder
    raise AssertionError("none of them has answered")


def test_g4_one_that_does_nothing_with_a_lease_costs_a_name_one_ttl_only(
    dlocks: Dlocks, new_holder: NewHolder
) -> None:
    stopped = listening(new_holder())
    with Lock("it", ttl=TTL):
        stopped.do(
            "threads = [threading.Thread(target=Lock('it', ttl=4.0, wait=60).acquire)"
            " for _ in range(3)]; [thread.start() for thread in threads]"
        )
        waiting(stopped, 4, TTL).pause()
    # The lease of the first is waited for, and none of the others of its process.
    other = waiting(new_holder(), 4, TTL)
    other.answer()
    assert other.do("lock.held")
    waiting_now = locks["default"].get("it")
    assert waiting_now is not None
    assert waiting_now.waiting == 0


def test_g4_one_killed_after_it_was_handed_the_lease_is_followed(
    dlocks: Dlocks, new_holder: NewHolder
) -> None:
    with Lock("it", ttl=TTL):
        first = waiting(new_holder(), 1, TTL)
        second = waiting(new_holder(), 2, TTL)
    first.answer()
    first.kill()
    second.answer(timeout=TTL + SOON)
    assert second.do("lock.held")


def test_g1_a_lease_that_was_handed_over_outlives_a_stall_of_two_thirds_of_its_ttl(
    own_redis: RedisServer, dlocks: Dlocks, new_holder: NewHolder
) -> None:
    with Lock("it", ttl=LONG):
        waiter = waiting(new_holder(), 1, 6.0)
    waiter.answer()
    # Holder and server, at the very beginning: nothing can be renewed meanwhile.
    waiter.pause()
    own_redis.pause()
    assert not threading.Event().wait(3.0)
    own_redis.resume()
    assert not Lock("it", bound=False).acquire(blocking=False)
    waiter.resume()
    assert waiter.do("lock.renew(), lock.held") == [None, True]
    assert not Lock("it", bound=False).acquire(timeout=1.0)
    assert [words for words in waiter.said if words[0] == "lost"] == []


@pytest.mark.parametrize("ttl", [3.0, LONG])
def test_g1_names_that_many_want_pass_from_process_to_process(
    ttl: float, dlocks: Dlocks, new_holder: NewHolder
) -> None:
    # Enough time for a busy machine; messages still count.
    options = {"command_timeout": 1.0}
    entry = alias(dlocks["default"]["LOCATION"], TTL=ttl, OPTIONS=options)
    with configured({"default": entry}):
        waiters = [new_holder(dlocks={"default": entry}) for _ in range(3)]
        for waiter in waiters:
            waiter.begin(
                "tokens = []\n"
                "for _ in range(100):\n"
                f"    with Lock('it', ttl={ttl}, wait=60) as lock:\n"
                "        tokens.append(lock.token); lock.check()"
            )
        for waiter in waiters:
            waiter.answer(timeout=60)
    tokens = [waiter.do("tokens") for waiter in waiters]
    assert all(each == sorted(each) for each in tokens)
    assert len({token for each in tokens for token in each}) == 300
