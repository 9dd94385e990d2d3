"""G4: waiters that die, or stop, cost those behind them nothing, or a moment."""

from __future__ import annotations

import pytest

from django_dlock import Lock, clock, locks
from tests.faults.aliases import LONG, Dlocks, alias, configured
from tests.faults.conftest import NewHolder
from tests.faults.holder import PATIENCE, Holder

HANDED, ASKS = 2.0, 3.0
"""Seconds for which a lease is handed over, and after which a waiter asks again."""
SLACK = 2.0
WAIT = f"lock = Lock('it', ttl={LONG}); lock.acquire(timeout={LONG})"


def in_line(holder: Holder, count: int) -> Holder:
    """Let it wait, so that so many do."""
    # It listens from now on, and so asks once: one that asks again meets who has the name by then.
    with Lock("warm", ttl=LONG):
        assert not holder.do("Lock('warm').acquire(timeout=0.1)")
    holder.begin(WAIT)
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
    first, second = in_line(new_holder(), 1), in_line(new_holder(), 2)
    first.kill()
    held.release()
    second.answer(timeout=HANDED)
    assert second.do("lock.held")


def test_g4_a_stopped_first_waiter_costs_a_moment_and_believes_no_old_letter(
    held: Lock, new_holder: NewHolder
) -> None:
    first, second = in_line(new_holder(), 1), in_line(new_holder(), 2)
    first.pause()
    held.release()
    second.answer(timeout=HANDED + ASKS + SLACK)
    first.resume()
    # It reads now that the lease was handed to it.
    assert second.do("lock.renew(), lock.held") == [None, True]
    assert not first.answered
    token = second.do("lock.token")
    second.do("lock.release()")
    first.answer()
    assert first.do("lock.held")
    assert first.do("lock.token") > token


def test_g4_one_killed_after_it_was_handed_the_lease_is_followed(
    held: Lock, new_holder: NewHolder
) -> None:
    first, second = in_line(new_holder(), 1), in_line(new_holder(), 2)
    held.release()
    first.answer()
    first.kill()
    second.answer(timeout=ASKS + SLACK)
    assert second.do("lock.held")


def test_g1_a_lease_that_was_handed_over_is_prolonged_in_time(
    held: Lock, dlocks: Dlocks, new_holder: NewHolder
) -> None:
    waiter = in_line(new_holder(), 1)
    held.release()
    waiter.answer()
    assert not Lock("it").acquire(timeout=1.5 * HANDED)
    assert waiter.do("lock.state, lock.remaining > 50") == ["held", True]


@pytest.mark.parametrize("ttl", [3.0, LONG])
def test_g1_names_that_many_want_pass_from_process_to_process(
    ttl: float, dlocks: Dlocks, new_holder: NewHolder
) -> None:
    # Time enough for a busy machine; letters are believed all the same.
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
