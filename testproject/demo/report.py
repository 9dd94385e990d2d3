"""From events and effects to the table and the verdict; knows no server and no clock."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from .journal import Event

__all__ = [
    "COLUMNS",
    "LOCKED",
    "PLAIN",
    "RECORD",
    "ROWS",
    "TITLES",
    "Span",
    "Tally",
    "overlaps",
    "spans",
    "table",
    "takeovers",
    "verdict",
]

PLAIN, LOCKED, RECORD = "plain", "locked", "record"
TITLES = {PLAIN: "plain Celery", LOCKED: "lock alone", RECORD: "lock + record"}
COLUMNS = tuple(TITLES)
WIDTH = max(len(title) for title in TITLES.values())


class Span(NamedTuple):
    """A time in which a body of an order ran; a run that was stopped has several."""

    order: int
    run: str
    start: float
    end: float


def spans(events: Iterable[Event], until: float) -> list[Span]:
    """When the bodies of one column ran.

    A killed run ends with its kill. A stopped process runs nothing, so its span ends with the
    stop, and what it still does when it wakes up is a span of its own. A run that never ended
    is taken to run still.

    Args:
        until: When the last event was looked for.
    """
    running: dict[str, Event] = {}
    stopped: set[str] = set()
    found: list[Span] = []
    for event in sorted(events, key=lambda event: event.at):
        # One that had ended when its process was stopped does not run again.
        if event.kind == "start" or (event.kind == "woken" and event.run in stopped):
            running[event.run] = event
        elif event.kind in ("end", "killed", "stopped") and event.run in running:
            began = running.pop(event.run)
            found.append(Span(event.order, event.run, began.at, event.at))
            if event.kind == "stopped":
                stopped.add(event.run)
    found += [Span(event.order, run, event.at, until) for run, event in running.items()]
    return found


def overlaps(found: Iterable[Span]) -> int:
    """How many pairs of runs of one order ran at the same time."""
    by_order: dict[int, list[Span]] = defaultdict(list)
    for span in found:
        by_order[span.order].append(span)
    pairs = {
        (one.run, other.run) if one.run < other.run else (other.run, one.run)
        for same in by_order.values()
        for one, other in combinations(same, 2)
        if one.run != other.run and one.start < other.end and other.start < one.end
    }
    return len(pairs)


def takeovers(events: Collection[Event], found: Collection[Span]) -> list[float]:
    """Seconds from every kill to the next start of a body of its order; infinite for none."""
    kills = [event for event in events if event.kind == "killed"]
    return [
        min(
            (
                span.start - kill.at
                for span in found
                if span.order == kill.order and span.run != kill.run and span.start >= kill.at
            ),
            default=math.inf,
        )
        for kill in kills
    ]


@dataclass(frozen=True, slots=True)
class Tally:
    """One column of the table."""

    orders: int
    deliveries: int
    bodies: int
    effects: int
    doubles: int
    lost: int
    overlaps: int
    takeovers: Sequence[float]

    @classmethod
    def of(
        cls, orders: Collection[int], events: Iterable[Event], effects: Sequence[int], until: float
    ) -> Tally:
        """Count one column.

        Args:
            orders: The numbers of the orders that were published.
            events: What the journal has of this column.
            effects: The order's number of every effect in the database.
        """
        events = list(events)
        found = spans(events, until)
        times = Counter(effects)
        kinds = Counter(event.kind for event in events)
        return cls(
            orders=len(orders),
            deliveries=kinds["received"],
            bodies=kinds["start"],
            effects=len(effects),
            doubles=sum(count - 1 for count in times.values()),
            lost=sum(order not in times for order in orders),
            overlaps=overlaps(found),
            takeovers=takeovers(events, found),
        )


def verdict(tallies: Mapping[str, Tally], *, kills: int) -> list[str]:
    """What the demonstration failed to show; empty when it showed everything.

    Args:
        kills: How many workers each column was to lose in the middle of a body.
    """
    plain, locked, record = tallies[PLAIN], tallies[LOCKED], tallies[RECORD]
    failures = [
        f"{TITLES[name]}: {len(tally.takeovers)} of {kills} workers were killed in a body"
        for name, tally in tallies.items()
        if len(tally.takeovers) != kills
    ]
    if not plain.doubles:
        failures.append("plain Celery shows no double effect, so nothing was demonstrated")
    if locked.overlaps:
        failures.append(f"the lock alone let {locked.overlaps} pairs of bodies overlap")
    if record.doubles:
        failures.append(f"lock and record let {record.doubles} double effects happen")
    if record.lost:
        failures.append(f"lock and record lost {record.lost} orders")
    return failures


def _longest(tally: Tally) -> str:
    longest = max(tally.takeovers, default=math.inf)
    return "none" if longest == math.inf else f"{longest:.1f} s"


ROWS: tuple[tuple[str, Callable[[Tally], object]], ...] = (
    ("orders", lambda tally: tally.orders),
    ("deliveries", lambda tally: tally.deliveries),
    ("bodies run", lambda tally: tally.bodies),
    ("effects", lambda tally: tally.effects),
    ("double effects", lambda tally: tally.doubles),
    ("lost orders", lambda tally: tally.lost),
    ("overlaps of bodies per key", lambda tally: tally.overlaps),
    ("take-over after a kill", _longest),
)


def table(tallies: Mapping[str, Tally]) -> str:
    """The tallies as text of less than 80 columns."""
    rows = [(name, [str(value(tallies[column])) for column in TITLES]) for name, value in ROWS]
    names = max(len(name) for name, _ in rows)
    rows = [("", list(TITLES.values())), ("-" * names, ["-" * WIDTH] * len(TITLES)), *rows]
    return "\n".join(
        "  ".join([name.ljust(names), *(cell.rjust(WIDTH) for cell in cells)])
        for name, cells in rows
    )
