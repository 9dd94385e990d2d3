"""Which held leases are checked, and when; through the watchdog where that matters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from django_dlock.core.held_lease import HeldLease
from django_dlock.core.schedule import Schedule
from django_dlock.core.watchdog import Watchdog
from tests.support.leases import lease_of

from .test_watchdog import Spy, Time, dog, held, spy, time

__all__ = ["dog", "spy", "time"]

pytestmark = pytest.mark.usefixtures("time")


def schedule_of(dog: Watchdog) -> Schedule:
    [schedule_of] = dog.schedules.values()
    return schedule_of


def test_1200_leases_acquired_one_by_one_need_three_calls_per_interval(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    kept = []
    for number in range(1200):
        kept.append(held(f"n{number}"))
        time.seconds += 0.005
    for _ in range(600):
        time.seconds += 0.05
        dog.tick()
    spy.calls.clear()
    for _ in range(200):
        time.seconds += 0.05
        dog.tick()
    assert [len(call) for call in spy.calls if call] == [500, 500, 200]
    assert all(lock.held for lock in kept)


def test_a_step_with_nothing_due_touches_no_lease(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [held(f"n{number}") for number in range(100)]
    dog.tick()
    looked: list[HeldLease] = []
    lives = Schedule._lives
    monkeypatch.setattr(
        Schedule, "_lives", lambda self, hold, now: looked.append(hold) or lives(self, hold, now)
    )
    late = held("late", renew=False, ttl=2)
    hold = lease_of(late)
    for _ in range(6):
        time.seconds += 0.5
        dog.tick()
    assert looked == [hold]
    assert len(kept) == 100


def test_a_lease_that_ends_while_it_is_added_is_not_renewed(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()

    class GoesNow(dict[str, HeldLease]):
        def pop(self, *args: Any) -> Any:
            # Another thread does this between the two steps.
            schedule = schedule_of(dog)
            schedule.fresh = {}
            schedule.discard(lease_of(lock))
            return None

    schedule_of(dog).fresh = GoesNow(schedule_of(dog).fresh)
    dog.tick()
    time.seconds += 10
    dog.tick()
    assert schedule_of(dog).leases == {}
    assert spy.renewed == []


def test_a_released_lease_is_not_kept_until_its_due_time(
    dog: Watchdog, spy: Spy, time: Time
) -> None:
    lock = held()
    dog.tick()
    gone = weakref.ref(lease_of(lock))
    lock.release()
    gc.collect()
    assert gone() is None


def test_due_times_do_not_pile_up(dog: Watchdog, spy: Spy, time: Time) -> None:
    kept = [held(f"n{number}") for number in range(10)]
    for _ in range(100):
        time.seconds += 1
        for lock in kept:
            lock.renew(ttl=30)
        dog.tick()
    # At most those of the last interval.
    assert len(schedule_of(dog)._times) <= 120


@pytest.mark.parametrize("ready", [True, False])
def test_a_lease_that_ends_before_its_answer_is_discarded(
    ready: bool, dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the thread would never end, and an idle process would send heartbeats forever.
    hold = lease_of(lock := held())
    dog.tick()
    time.seconds += 10
    owner, method = (Schedule, "take") if ready else (Spy, "answer")
    before = getattr(owner, method)

    def lose_first(*args: Any, **kwargs: Any) -> Any:
        hold.lose_silently("refused")
        return before(*args, **kwargs)

    monkeypatch.setattr(owner, method, lose_first)
    dog.tick()
    assert schedule_of(dog).leases == {}
    assert lock.lost


@pytest.mark.parametrize("goes_on", [True, False])
def test_g1_a_lease_that_needs_no_renewal_when_due_is_planned_again(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr(spy.backend, "renewals_per_call", 1)
    first, second = held("first", ttl=29), held("second", ttl=30)
    hold = lease_of(second)
    answer = spy.answer

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(spy, "answer", answer)
        if goes_on:
            second.renew()
        else:
            hold.stop_renewing("interrupted")
        return answer(*args, **kwargs)

    monkeypatch.setattr(spy, "answer", meanwhile)
    time.seconds += 10
    dog.tick()
    assert spy.renewed == ["first"]
    for _ in range(30):
        time.seconds += 1
        dog.tick()
    assert first.held
    assert hold.ended is not goes_on
    assert spy.renewed.count("second") == (3 if goes_on else 0)


def test_g6_an_exception_loses_no_lease(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [held(f"n{number}") for number in range(5)]
    fixed = held("fixed", renew=False)
    gone = lease_of(fixed)
    time.seconds += 10

    def stumble(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(HeldLease, "renewal", stumble)
        dog.tick()
    time.seconds += 1
    dog.tick()
    assert sorted(spy.renewed) == sorted(lock.name for lock in kept)
    time.seconds += 19
    dog.tick()
    assert all(lock.held for lock in kept)
    assert gone.ended


def test_g2_losses_behind_an_unanswered_call_are_reported_in_time(
    dog: Watchdog, spy: Spy, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spy.backend, "renewals_per_call", 2)
    kept = [held(f"n{number}") for number in range(7)]
    holds = [lease_of(lock) for lock in kept]
    spy.hangs = True
    # Sent shortly before the state becomes in doubt, and again shortly before the end.
    time.seconds += 14.9
    assert dog.tick() <= time.seconds + 0.1
    time.seconds += 0.15
    dog.tick()
    assert all(hold.doubt_told for hold in holds)
    time.seconds += 14.5
    dog.tick()
    assert not any(hold.ended for hold in holds)
    time.seconds += 0.2
    dog.tick()
    assert all(hold.ended for hold in holds)
    assert {lock.lost_reason for lock in kept} == {"unreachable"}
