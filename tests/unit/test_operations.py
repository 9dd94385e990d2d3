"""What the admin and the commands have in common."""

from __future__ import annotations

import pytest
from django.utils import timezone

from django_dlock import process
from django_dlock.lease import LeaseInfo
from django_dlock.operators.inspection import duration, is_running


@pytest.mark.parametrize(
    ("kind", "state", "ttl", "running"),
    [
        ("held", "alive", 30.0, True),
        ("held", "silent", 30.0, True),
        ("held", "unknown", 30.0, True),
        ("held", "dead", 30.0, False),
        ("held", "alive", None, True),
        ("held", "silent", None, False),
        ("parked", "unknown", 30.0, True),
        ("reserved", "unknown", 30.0, True),
        ("cooling", "unknown", 30.0, False),
    ],
)
def test_only_locks_without_a_running_holder_are_released_without_force(kind, state, ttl, running):
    info = LeaseInfo(
        name="n",
        alias="default",
        kind=kind,
        owner="o",
        token=1,
        acquired_at=timezone.now(),
        age=1.0,
        ttl=ttl,
        renewals=0,
        waiting=0,
        process=process.current(),
        holder_state=state,
    )
    assert is_running(info) is running


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.2, "0.0s"),
        (0.04, "0.0s"),
        (59.94, "59.9s"),
        (59.99, "60.0s"),
        (60, "1m 0s"),
        (3599.9, "59m 59s"),
        (3600, "1h 0m"),
        (86399, "23h 59m"),
        (90000, "1d 1h"),
    ],
)
def test_a_duration_is_shown_in_two_units(seconds, text):
    assert duration(seconds) == text
