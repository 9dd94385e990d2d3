"""When a process decides to switch by itself."""

from __future__ import annotations

import pytest

from django_dlock import clock
from django_dlock.backends.failover.config import FailoverOptions
from django_dlock.backends.failover.health import Health
from django_dlock.backends.failover.record import Reading

AFTER = 15.0
OPTIONS = FailoverOptions(
    primary="one", standby="two", max_ttl=30.0, failover_after=AFTER, failback_after=AFTER
)
INTERVAL = OPTIONS.view_ttl / 3


class Time:
    """The clock of the process; a test lets it pass."""

    now = 1000.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock, "now", lambda: time.now)
    return time


def reading(silent_for: float = 3600.0) -> Reading:
    return Reading(1, "one", 35.0, 0.0, 86400.0, silent_for, "", "")


@pytest.fixture
def health(time: Time) -> Health:
    health = Health(OPTIONS)
    health.begin(reading())
    return health


def test_a_store_that_fails_for_long_enough_is_replaced(time: Time, health: Health) -> None:
    began = time.now
    while not health.active_failed(reading()):
        time.passes(INTERVAL)
    assert AFTER / 2 < time.now - began <= AFTER


def test_one_failure_long_ago_does_not_count_with_the_next_one(time: Time, health: Health) -> None:
    assert not health.active_failed(reading())
    # The process has used no locks meanwhile, and nobody else has.
    time.passes(3600)
    assert not health.active_failed(reading())


def test_two_answers_far_apart_do_not_lead_back(time: Time, health: Health) -> None:
    assert not health.primary_tried(True)
    time.passes(3600)
    assert not health.primary_tried(True)
    began = time.now
    while not health.primary_tried(True):
        time.passes(AFTER / 8)
    assert time.now - began == pytest.approx(AFTER)
