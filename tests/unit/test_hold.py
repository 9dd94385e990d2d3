"""One grant: when its renewals are due."""

from __future__ import annotations

import dataclasses

import pytest

from django_dlock import DEFAULT, Lock, clock, locks, watchdog
from django_dlock.hold import Hold
from django_dlock.lease import Lease
from django_dlock.lock_options import LockOptions

HANDLE = Lock("it", using="local")


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(clock, "now", lambda: 1000.0)
    return 1000.0


def hold(*, ttl: float, asked_at: float = 1000.0, **options: float) -> Hold:
    """The hold of a lease that was asked for at ``asked_at`` and granted for ``ttl``."""
    backend = locks["local"]
    asked = LockOptions.read(
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
    lease = Lease("it", "owner", 7, ttl, asked_at + ttl * (1 - clock.DRIFT))
    return Hold(
        lease, backend, object(), dataclasses.replace(asked, **options), handle=HANDLE, sender=Lock
    )


def test_a_lease_that_was_handed_over_is_prolonged_to_what_was_asked_for_at_once() -> None:
    handed = hold(ttl=2.0, asked_at=999.1)
    assert handed.due == pytest.approx(1000.2)
    assert handed.deadline == pytest.approx(999.1 + 1.98)
    assert handed.renewal(1000.2).ttl == 30
    handed.confirm(1000.2, 30, 1000.2)
    assert 1009.8 < handed.due <= 1010.2
    assert handed.deadline == pytest.approx(1029.9)


def test_g2_a_lease_that_was_handed_over_is_not_in_doubt_until_its_renewal_is_overdue() -> None:
    handed = hold(ttl=2.0, asked_at=999.1)
    assert handed.state == "held"
    assert handed.confirmed_at + handed.ttl / 2 > handed.due + 0.2


def test_g6_max_hold_counts_from_the_hand_over() -> None:
    handed = hold(ttl=2.0, asked_at=999.1, max_hold=10.0)
    assert handed.max_end == 1010.0
    assert handed.renewal(1000.2).ttl == pytest.approx(9.8)


def test_a_fixed_lease_is_not_prolonged_whatever_it_was_granted_for() -> None:
    fixed = hold(ttl=2.0, renew=False)  # type: ignore[arg-type]
    assert fixed.due == fixed.deadline


@pytest.mark.parametrize("another", [False, True])
def test_the_thread_is_not_woken_for_each_lease_that_is_handed_over(
    another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = [1000.0]
    monkeypatch.setattr(clock, "now", lambda: moment[0])
    dog = watchdog.Watchdog()
    pokes: list[float] = []

    def wake() -> None:
        pokes.append(moment[0])
        dog._wakes_at = dog.tick()

    monkeypatch.setattr(dog, "_poke", wake)
    monkeypatch.setattr(dog, "_thread", object())
    wakes = 0
    if another:
        held = hold(ttl=30.0, asked_at=moment[0])
        held.owner = "another"
        dog.watch(held)
        pokes.clear()
    # Three seconds of holds of a millisecond each.
    for _ in range(3000):
        moment[0] += 0.001
        if moment[0] >= dog._wakes_at:
            wakes += 1
            dog._wakes_at = dog.tick()
        handed = hold(ttl=2.0, asked_at=moment[0] - 0.0005)
        dog.watch(handed)
        dog.unwatch(handed)
    assert len(pokes) == 1
    assert wakes <= 15
