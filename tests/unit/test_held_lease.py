"""One grant: when its renewals are due."""

from __future__ import annotations

import pytest

from django_dlock import DEFAULT, Lock, clock, locks
from django_dlock.core import watchdog
from django_dlock.core.held_lease import HeldLease
from django_dlock.core.options import LockOptions
from django_dlock.lease import Lease


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    return 1000.0


def hold(*, ttl: float, asked_at: float = 1000.0, **options: float) -> HeldLease:
    """The held lease of a request sent at ``asked_at`` and granted for ``ttl``."""
    backend = locks["local"]
    asked = LockOptions(
        backend,
        ttl=30,
        wait=DEFAULT,
        renew=True,
        max_hold=DEFAULT,
        min_hold=None,
        reentrant=False,
        metadata=None,
        on_lost=None,
        hold_until="release",
    )
    for option, value in options.items():
        setattr(asked, option, value)
    lease = Lease("it", "owner", 7, ttl, asked_at)
    return HeldLease(lease, backend, object(), asked, sender=Lock)


def test_g2_a_grant_shorter_than_requested_counts_as_granted() -> None:
    short = hold(ttl=6.0)
    assert short.deadline == pytest.approx(1005.94)
    assert 1001.9 < short.due <= 1002.0
    assert short.renewal(1002.0).ttl == 30


def test_g2_a_renewal_shorter_than_requested_counts_as_granted() -> None:
    held = hold(ttl=30.0)
    held.confirm(1010.0, 6.0, 1010.0)
    assert held.deadline == pytest.approx(1015.94)
    assert 1011.9 < held.due <= 1012.0
    assert held.renewal(1012.0).ttl == 30


def test_a_grant_counts_from_its_request() -> None:
    handed = hold(ttl=30.0, asked_at=991.0)
    assert handed.deadline == pytest.approx(991.0 + 29.7)
    assert 1000.7 < handed.due <= 1001.0
    assert handed.state == "held"


def test_g6_max_hold_counts_from_the_receipt_of_the_grant() -> None:
    handed = hold(ttl=10.0, asked_at=993.0, max_hold=10.0)
    assert handed.max_end == 1010.0
    assert handed.renewal(1000.2).ttl == pytest.approx(9.8)


def test_a_lease_of_max_hold_is_not_renewed() -> None:
    short = hold(ttl=10.0, asked_at=999.99, max_hold=10.0)
    assert short.due == short.deadline


def test_a_fixed_lease_is_not_prolonged_whatever_was_granted() -> None:
    fixed = hold(ttl=2.0, renew=False)  # type: ignore[arg-type]
    assert fixed.due == fixed.deadline


@pytest.mark.parametrize("another", [False, True])
def test_the_thread_is_not_woken_for_each_lease_that_is_handed_over(
    another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = [1000.0]
    monkeypatch.setattr(clock, "now", lambda: moment[0])
    dog = watchdog.Watchdog()
    woken: list[float] = []

    def wake() -> None:
        woken.append(moment[0])
        dog.wakes_at = dog.tick()

    monkeypatch.setattr(dog, "wake", wake)
    monkeypatch.setattr(dog, "thread", object())
    wakes = 0
    if another:
        held = hold(ttl=30.0, asked_at=moment[0])
        held.owner = "another"
        dog.watch(held)
        woken.clear()
    # The lock is held for a millisecond at a time, for three seconds.
    for _ in range(3000):
        moment[0] += 0.001
        if moment[0] >= dog.wakes_at:
            wakes += 1
            dog.wakes_at = dog.tick()
        handed = hold(ttl=2.0, asked_at=moment[0] - 0.0005)
        dog.watch(handed)
        dog.unwatch(handed)
    assert len(woken) == 1
    assert wakes <= 15


def test_g6_if_a_backend_grants_less_the_rest_of_max_hold_is_requested_again() -> None:
    held = hold(ttl=15.0, max_hold=60.0)
    asked = 0
    while held.due < held.deadline:
        asked += 1
        now = held.due
        renewal = held.renewal(now)
        assert now + renewal.ttl <= held.max_end + 0.001
        held.confirm(now, renewal.ttl / 2, now)
    assert asked <= 30
    assert held.max_end - 3 * held.backend.command_timeout < held.deadline <= held.max_end


def test_g6_an_earlier_end_is_an_earlier_max_hold() -> None:
    held = hold(ttl=30.0)
    assert held.end_at(1060.0, 1000.0) is None
    assert held.max_end == 1060.0
    assert held.due < held.deadline
    held.confirm(1025.0, 30.0, 1025.0)
    assert held.renewal(1040.0).ttl == 20.0
    held.confirm(1040.0, 20.0, 1040.0)
    assert held.due == held.deadline == pytest.approx(1060.0 - 0.2)


def test_g6_an_end_before_that_of_the_grant_cuts_it_in_the_store() -> None:
    held = hold(ttl=30.0)
    cut = held.end_at(1005.0, 1000.0)
    assert cut is not None
    assert (cut.ttl, cut.shorten) == (5.0, 1)
    assert held.due == held.deadline == pytest.approx(1005.0 - 0.05)


def test_g6_a_little_less_than_max_hold_is_enough() -> None:
    held = hold(ttl=29.5, max_hold=35.0)
    renewal = held.renewal(1010.0)
    assert renewal.ttl == 25.0
    held.confirm(1010.0, renewal.ttl * 0.98, 1010.0)
    assert held.due == held.deadline > 1034.0
