"""What one row of the database backend remembers, without a database."""

from __future__ import annotations

import pytest

from django_dlock.backends.database import rows
from django_dlock.lease import LeaseRequest

NOW = 1_800_000_000_000_000


def request(owner: str) -> LeaseRequest:
    return LeaseRequest("name", owner, 30.0)


def cancelled(*owners: str) -> rows.Row:
    row = rows.Row(version=1)
    for number, owner in enumerate(owners):
        row.cancel(request(owner), NOW + number)
    return row


def test_g7_an_attempt_cancelled_before_many_others_is_not_granted_late() -> None:
    # As when a thousand waiting coroutines of one process are cancelled at once.
    row = cancelled(*(f"owner{number}" for number in range(1000)))
    granted, _ = row.acquire(request("owner0"), NOW + 2000, "{}", "")
    assert not granted
    assert not row.lives(NOW + 2000)


def test_a_row_remembers_no_more_cancelled_attempts_than_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "MOST_CANCELLED", 3)
    row = cancelled("a", "b", "c", "d")
    assert [line.split(" ")[1] for line in row.cancelled.splitlines()] == ["b", "c", "d"]


def test_cancelled_attempts_are_forgotten_once_they_cannot_arrive_any_more() -> None:
    row = cancelled("a")
    row.cancel(request("b"), NOW + rows.CANCELLED + 31 * rows.SECOND)
    assert [line.split(" ")[1] for line in row.cancelled.splitlines()] == ["b"]
