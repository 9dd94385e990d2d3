"""What one row of the database backend remembers, without a database."""

from __future__ import annotations

import itertools

import pytest

from django_dlock.backends.database import memory, rows
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


def test_a_cancelled_attempt_that_had_no_lease_has_released_none() -> None:
    row = cancelled("a")
    assert row.release("a", 0.0, NOW + 1) == ("refused", [])
    row.acquire(request("b"), NOW + 1, "{}", "")
    row.cancel(request("b"), NOW + 2)
    assert row.release("b", 0.0, NOW + 3) == ("released", [])


def test_a_row_remembers_no_more_cancelled_attempts_than_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "MOST", 3)
    row = cancelled("a", "b", "c", "d")
    assert [line.split(" ")[1] for line in row.cancelled.splitlines()] == ["b", "c", "d"]


def test_cancelled_attempts_are_forgotten_once_they_cannot_arrive_any_more() -> None:
    row = cancelled("a")
    row.cancel(request("b"), NOW + rows.LATE_BY + 31 * rows.SECOND)
    assert [line.split(" ")[1] for line in row.cancelled.splitlines()] == ["b"]


def test_of_the_ends_of_earlier_leases_releases_are_dropped_first() -> None:
    past, cuts = "", []
    for number in range(100):
        before = past
        past = memory.with_end(past, "b" if number == 3 else "r", f"{number:032}")
        if before and not past.endswith(before):
            cuts.append(number)
    assert memory.end_of(past, f"{3:032}") == "b"
    assert memory.end_of(past, f"{99:032}") == "r"
    assert memory.end_of(past, f"{4:032}") == ""
    assert memory.is_cut(past)
    # Each cut makes room for many more, because only then the row has to be read.
    assert min(later - cut for cut, later in itertools.pairwise(cuts)) > 8


def test_a_waiter_that_asks_every_few_seconds_keeps_its_position() -> None:
    # A waiter that is notified asks after two fifths to a half of its ticket's life.
    row = rows.Row(version=1)
    row.acquire(request("holder"), NOW, "{}", "")
    waits, ticket = request("waiter")._replace(waits=True), rows.micro(rows.TICKET_TTL)
    row.acquire(waits, NOW, "{}", "channel")
    row.acquire(waits, NOW + ticket * 2 // 5, "{}", "channel")
    assert [it.owner for it in row.tickets(NOW + ticket * 13 // 10)] == ["waiter"]


def test_asking_again_at_once_does_not_change_the_row() -> None:
    row = rows.Row(version=1)
    row.acquire(request("holder"), NOW, "{}", "")
    waits, ticket = request("waiter")._replace(waits=True), rows.micro(rows.TICKET_TTL)
    row.acquire(waits, NOW, "{}", "")
    before = row.values()
    row.acquire(waits, NOW + ticket // 5, "{}", "")
    assert row.values() == before


def test_a_lease_that_is_parked_wakes_all_waiters() -> None:
    row = rows.Row(version=1)
    row.acquire(request("holder"), NOW, "{}", "")
    row.acquire(request("waiter")._replace(waits=True), NOW, "{}", "channel")
    parked = request("parked")._replace(kind="parked", replaces="holder")
    granted, messages = row.acquire(parked, NOW + 1, "{}", "")
    assert granted
    assert messages == [rows.Message("channel", "waiter", 0)]
    assert [it.owner for it in row.tickets(NOW + 1)] == ["waiter"]


def test_even_ends_that_are_losses_have_limited_room() -> None:
    past = ""
    for number in range(100):
        past = memory.with_end(past, "e", f"{number:032}")
        assert len(past) < memory.LONG + 34
    assert memory.end_of(past, f"{99:032}") == "e"


def test_a_waiter_that_asks_again_still_waits_since_it_came() -> None:
    row = rows.Row(version=1)
    row.acquire(request("holder"), NOW, "{}", "")
    waiter = request("waiter")._replace(waits=True)
    later = NOW + rows.micro(rows.TICKET_TTL / 2)
    for now in (NOW + 1, later):
        assert not row.acquire(waiter, now, "{}", "")[0]
    (ticket,) = row.tickets(later)
    assert (ticket.since, ticket.asked_at) == (NOW + 1, later)
