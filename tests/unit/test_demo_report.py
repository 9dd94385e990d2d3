"""The report of the demonstration: what counts as an overlap, a double, a loss."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from testproject.demo.journal import Event, Journal, Kind
from testproject.demo.report import (
    COLUMNS,
    LOCKED,
    PLAIN,
    RECORD,
    ROWS,
    Span,
    Tally,
    conclusion,
    legend,
    overlaps,
    spans,
    table,
    takeovers,
    verdict,
    with_table,
)


def event(kind: Kind, order: int, run: str, at: float) -> Event:
    return Event(kind, LOCKED, order, run, 0, False, at)


def test_two_runs_of_one_order_at_the_same_time_overlap_once() -> None:
    found = spans(
        [
            event("start", 1, "a", 0.0),
            event("start", 1, "b", 1.0),
            event("end", 1, "b", 2.0),
            event("end", 1, "a", 3.0),
        ],
        until=9.0,
    )
    assert overlaps(found) == 1


def test_runs_of_different_orders_do_not_overlap() -> None:
    assert overlaps([Span(1, "a", 0.0, 3.0), Span(2, "b", 1.0, 2.0)]) == 0


def test_a_run_that_begins_as_another_ends_does_not_overlap_it() -> None:
    assert overlaps([Span(1, "a", 0.0, 3.0), Span(1, "b", 3.0, 4.0)]) == 0


def test_a_pair_that_overlaps_twice_counts_once() -> None:
    found = [Span(1, "a", 0.0, 1.0), Span(1, "b", 0.5, 2.5), Span(1, "a", 2.0, 3.0)]
    assert overlaps(found) == 1


def test_a_killed_run_ends_with_its_kill() -> None:
    events = [
        event("start", 1, "a", 0.0),
        event("killed", 1, "a", 1.0),
        event("start", 1, "b", 1.5),
        event("end", 1, "b", 2.0),
    ]
    assert overlaps(spans(events, until=9.0)) == 0
    assert overlaps(spans([e for e in events if e.kind != "killed"], until=9.0)) == 1


def test_a_stopped_run_counts_again_from_the_moment_it_continues() -> None:
    events = [
        event("start", 1, "a", 0.0),
        event("stopped", 1, "a", 1.0),
        event("start", 1, "b", 2.0),
        event("end", 1, "b", 3.0),
        event("woken", 1, "a", 4.0),
        event("end", 1, "a", 5.0),
    ]
    assert overlaps(spans(events, until=9.0)) == 0
    early = [replace(e, at=2.5) if e.kind == "woken" else e for e in events]
    assert overlaps(spans(early, until=9.0)) == 1


def test_a_run_that_ended_before_its_process_was_stopped_does_not_count_again() -> None:
    events = [
        event("start", 1, "a", 0.0),
        event("end", 1, "a", 1.0),
        event("stopped", 1, "a", 1.1),
        event("woken", 1, "a", 2.0),
    ]
    assert spans(events, until=9.0) == [Span(1, "a", 0.0, 1.0)]


def test_a_run_without_an_end_counts_as_running() -> None:
    assert spans([event("start", 1, "a", 2.0)], until=9.0) == [Span(1, "a", 2.0, 9.0)]


def test_take_over_is_counted_from_the_kill_to_the_next_start_of_its_order() -> None:
    events = [
        event("start", 1, "a", 0.0),
        event("start", 1, "early", 0.5),
        event("end", 1, "early", 0.6),
        event("killed", 1, "a", 1.0),
        event("start", 2, "other", 1.1),
        event("start", 1, "b", 1.75),
        event("start", 1, "c", 5.0),
    ]
    assert takeovers(events, spans(events, until=9.0)) == [0.75]


def test_a_killed_order_without_a_successor_has_an_infinite_take_over() -> None:
    events = [event("start", 1, "a", 0.0), event("killed", 1, "a", 1.0)]
    assert takeovers(events, spans(events, until=9.0)) == [math.inf]


def test_doubles_and_losses_are_counted_over_the_published_orders() -> None:
    tally = Tally.of([1, 2, 3], [event("received", 0, "", 0.0)], [1, 1, 1, 2], until=9.0)
    assert (tally.orders, tally.effects, tally.doubles, tally.lost) == (3, 4, 2, 1)
    assert tally.deliveries == 1


GOOD = Tally(3, 6, 6, 3, 0, 0, 0, (0.1, 0.2), (4.0,), 0)
SHOWN = {
    PLAIN: replace(GOOD, effects=5, doubles=2, overlaps=1, charged_again=2),
    LOCKED: replace(GOOD, effects=4, doubles=1, charged_again=1),
    RECORD: GOOD,
}


def test_a_demonstration_that_showed_all_effects_has_no_failure() -> None:
    assert verdict(SHOWN, kills=2) == []


@pytest.mark.parametrize(
    ("column", "changed", "said"),
    [
        (PLAIN, replace(GOOD, doubles=0), "no double effect"),
        (LOCKED, replace(GOOD, overlaps=1), "overlap"),
        (RECORD, replace(GOOD, doubles=1), "double effects"),
        (RECORD, replace(GOOD, lost=1), "lost"),
        (LOCKED, replace(GOOD, takeovers=(0.1,)), "1 of 2 children"),
        (LOCKED, replace(GOOD, worker_takeovers=()), "no whole worker"),
    ],
)
def test_an_effect_that_was_not_shown_is_a_failure(column: str, changed: Tally, said: str) -> None:
    (failure,) = verdict({**SHOWN, column: changed}, kills=2)
    assert said in failure


def test_the_table_has_a_line_for_every_count_and_fits_a_terminal() -> None:
    lines = table(SHOWN).splitlines()
    assert max(map(len, lines)) < 80
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "orders",
        "deliveries",
        "bodies run",
        "effects",
        "double effects",
        "lost orders",
        "two runs of one order at once",
        "next run after a child is killed",
        "next run after a worker is killed",
    ]
    assert lines[6].split()[-len(COLUMNS) :] == ["2", "1", "0"]


def test_the_table_of_a_run_takes_the_place_of_the_one_in_a_page() -> None:
    page = "a\n<!-- demonstration -->\nold\n<!-- end of the demonstration -->\nb\n"
    written = with_table(page, SHOWN)
    assert written.startswith("a\n<!-- demonstration -->\n\n| | plain Celery |")
    assert written.endswith("\n\n<!-- end of the demonstration -->\nb\n")
    assert "old" not in written
    lines = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", written, re.MULTILINE))
    assert list(lines)[1:] == [row.name for row in ROWS]
    assert lines["double effects"] == f"**{SHOWN[PLAIN].doubles}**"
    assert lines["lost orders"] == str(SHOWN[PLAIN].lost)
    assert with_table(written, SHOWN) == written


def test_every_row_is_explained_within_the_width_of_a_terminal() -> None:
    lines = legend().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines] == [row.name for row in ROWS]
    assert all(row.meaning for row in ROWS)


def test_the_conclusion_counts_orders_and_not_charges() -> None:
    tally = Tally.of([1, 2, 3], [], [1, 1, 1, 2], until=9.0)
    assert (tally.charged_again, tally.doubles) == (1, 2)
    assert "charged 2 of 3 orders more than once" in conclusion(SHOWN)


def test_the_runs_of_a_killed_worker_end_with_it() -> None:
    events = [
        event("start", 1, "a", 0.0),
        event("start", 2, "b", 0.5),
        event("worker_killed", 1, "a", 1.0),
        event("killed_beside", 2, "b", 1.0),
        event("start", 2, "c", 5.0),
        event("start", 1, "d", 6.0),
    ]
    found = spans(events, until=9.0)
    assert overlaps(found) == 0
    assert takeovers(events, found) == []
    assert takeovers(events, found, "worker_killed") == [5.0]


def test_the_journal_returns_each_complete_line_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with journal.body(PLAIN, 7) as body:
        body.note("effect")
    with (tmp_path / "journal").open("a") as file:
        file.write('{"kind": "st')
    kinds = [line.kind for line in journal.new()]
    assert kinds == ["start", "effect", "end"]
    assert journal.new() == []


def test_the_journal_records_the_end_of_a_body_that_raises(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(LookupError), journal.body(PLAIN, 7):
        raise LookupError
    with journal.body(PLAIN, 7):
        pass
    assert [(line.kind, line.first) for line in journal.new()] == [
        ("start", True),
        ("end", True),
        ("start", False),
        ("end", False),
    ]
