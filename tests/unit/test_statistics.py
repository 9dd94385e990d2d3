"""How lock statistics are added up in memory; ``integration/test_statistics.py`` writes them."""

from __future__ import annotations

import pytest

from django_dlock.metrics import counts, instruments, table
from django_dlock.metrics.counts import KEPT, MINUTE, Counts, Series
from django_dlock.metrics.instruments import DURATIONS
from django_dlock.models import LockStatistics
from django_dlock.testing.clock import FakeClock

ORDER = {"alias": "default", "group": "order"}
START = 1_790_000_040
"""The start of a minute."""


@pytest.fixture
def clock(monkeypatch):
    """The wall clock and the clock for durations, both stopped at the start of a minute."""
    with FakeClock() as fake:
        monkeypatch.setattr(counts.time, "time", lambda: START + fake() - 1000.0)
        yield fake


@pytest.fixture
def counted(clock):
    return Counts()


def series(instrument, label="", **labels):
    labels = {**ORDER, **labels}
    return Series(instrument.name, labels["alias"], labels["group"], label)


def totals(minutes, instrument):
    return {
        minute - START: round(points[series(instrument)].total, 6)
        for minute, points in minutes.items()
        if series(instrument) in points
    }


def test_minutes_begin_by_the_wall_clock(counted, clock):
    assert START % MINUTE == 0
    counted.add(instruments.CONTENTIONS, 1, ORDER)
    clock.advance(59.9)
    counted.add(instruments.CONTENTIONS, 2, ORDER)
    clock.advance(0.1)
    counted.add(instruments.CONTENTIONS, 4, ORDER)
    taken = counted.take()
    found = {
        minute: points[series(instruments.CONTENTIONS)].count for minute, points in taken.items()
    }
    assert found == {START: 3, START + 60: 4}
    assert counted.take() == {}


def test_durations_are_counted_in_the_bucket_of_their_bound(counted):
    for seconds in (0.0, 0.001, 0.002, 3600.0, 7200.0):
        counted.add(instruments.WAITS, seconds, ORDER)
    (points,) = counted.take().values()
    point = points[series(instruments.WAITS)]
    assert point.count == 5
    assert point.total == pytest.approx(10800.003)
    assert point.highest == 7200.0
    assert point.buckets == [2, 1, *[0] * 8, 1, 1]
    assert len(point.buckets) == len(DURATIONS) + 1 == len(LockStatistics.BUCKETS)


def test_what_is_held_counts_for_each_second_in_each_minute(counted, clock):
    clock.advance(50)
    counted.add(instruments.HELD, 1, ORDER)
    clock.advance(5)
    counted.add(instruments.HELD, 1, ORDER)
    clock.advance(10)
    # It goes on without any event.
    assert totals(counted.take(), instruments.HELD) == {0: 15.0, 60: 10.0}
    clock.advance(60)
    counted.add(instruments.HELD, -2, ORDER)
    assert totals(counted.take(), instruments.HELD) == {60: 110.0, 120: 10.0}
    assert counted.is_idle


def test_an_idle_process_has_nothing_to_write(counted, clock):
    assert counted.is_idle
    counted.add(instruments.HELD, 1, ORDER)
    clock.advance(1)
    counted.take()
    assert not counted.is_idle
    counted.add(instruments.HELD, -1, ORDER)
    counted.take()
    clock.advance(3600)
    assert counted.is_idle
    assert counted.take() == {}


def test_what_was_held_before_counting_began_is_not_negative(counted, clock):
    counted.add(instruments.HELD, -1, ORDER)
    clock.advance(10)
    counted.add(instruments.HELD, 1, ORDER)
    clock.advance(10)
    assert totals(counted.take(), instruments.HELD) == {0: 10.0}


def test_a_process_that_was_suspended_held_it_for_some_minutes_only(counted, clock):
    counted.add(instruments.HELD, 1, ORDER)
    clock.advance(8 * 3600)
    taken = counted.take()
    assert len(taken) == KEPT // MINUTE
    assert sum(totals(taken, instruments.HELD).values()) == KEPT


def test_a_step_of_the_wall_clock_moves_minutes_but_no_duration(counted, clock, monkeypatch):
    counted.add(instruments.HELD, 1, ORDER)
    clock.advance(30)
    monkeypatch.setattr(counts.time, "time", lambda: START - 3600 + clock() - 1000.0)
    assert totals(counted.take(), instruments.HELD) == {0: 30.0}
    clock.advance(30)
    assert totals(counted.take(), instruments.HELD) == {-3600: 30.0}


def test_what_could_not_be_written_is_counted_again_for_a_while(counted, clock):
    counted.add(instruments.WAITS, 0.2, ORDER)
    taken = counted.take()
    counted.add(instruments.WAITS, 0.4, ORDER)
    counted.put_back(taken)
    (points,) = counted.take().values()
    point = points[series(instruments.WAITS)]
    assert (point.count, point.total, point.highest) == (2, pytest.approx(0.6), 0.4)
    clock.advance(KEPT + MINUTE)
    counted.put_back(taken)
    assert counted.is_idle


def test_minutes_that_nobody_takes_are_forgotten(counted, clock):
    for _ in range(1000):
        counted.add(instruments.CONTENTIONS, 1, ORDER)
        clock.advance(MINUTE)
    taken = counted.take()
    assert len(taken) == KEPT // MINUTE
    assert max(taken) == START + 999 * MINUTE


def test_each_count_has_a_row_for_its_minute_its_ten_minutes_and_its_hour(counted, clock):
    counted.add(instruments.LOSSES, 1, {**ORDER, "reason": "expired"})
    clock.advance(MINUTE)
    counted.add(instruments.LOSSES, 1, {**ORDER, "reason": "expired"})
    counted.add(instruments.REQUEUES, 1, {"task": "shop.charge", "reason": "contended"})
    found = {(row[1], row[2] - START, *row[3:7]): row[7] for row in table._rows(counted.take())}
    lost = ("django_dlock.losses", "default", "order", "expired")
    put_back = ("django_dlock.task.requeues", "", "shop.charge", "contended")
    # The minute is the fourth of its ten minutes, and the fifteenth of its hour.
    ten, hour = -START % 600 - 600, -START % 3600 - 3600
    assert found == {
        (60, 0, *lost): 1,
        (60, 60, *lost): 1,
        (600, ten, *lost): 2,
        (3600, hour, *lost): 2,
        (60, 60, *put_back): 1,
        (600, ten, *put_back): 1,
        (3600, hour, *put_back): 1,
    }


def test_rows_are_in_the_order_in_which_every_process_locks_them(counted):
    for number in range(50):
        counted.add(instruments.CONTENTIONS, 1, {"alias": "default", "group": f"g{number}"})
    taken = counted.take()
    ids = [row[0] for row in sorted(table._rows(taken))]
    assert ids == sorted(ids)
    assert len(ids) == len(set(ids)) == 150


@pytest.mark.parametrize(
    ("text", "stored"),
    [("a\0b", "a?b"), ("lone \ud800", "lone ?"), ("é" * 70, "é" * 64), ("🔒<b>", "🔒<b>")],
)
def test_text_that_a_database_refuses_is_replaced(text, stored):
    assert table._storable(text, 64) == stored


def test_texts_that_become_the_same_are_one_row(counted):
    for group in ("x\0", "x?", "x\ud800"):
        counted.add(instruments.CONTENTIONS, 1, {"alias": "default", "group": group})
    rows = list(table._rows(counted.take()))
    assert [row[7] for row in rows] == [3, 3, 3]
