"""Makes the table and the verdict from events and effects; uses no server and no clock."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from .journal import Event, Kind

PLAIN, LOCKED, RECORD = "plain", "locked", "record"
TITLES = {PLAIN: "plain Celery", LOCKED: "lock alone", RECORD: "lock + record"}
COLUMNS = tuple(TITLES)
ENDS = frozenset({"end", "killed", "worker_killed", "killed_beside", "stopped"})
WIDTH = max(len(title) for title in TITLES.values())


class Span(NamedTuple):
    """A period in which a body of an order ran; a run that was stopped has several."""

    order: int
    run: str
    start: float
    end: float


def spans(events: Iterable[Event], until: float) -> list[Span]:
    """The periods in which the bodies of one column ran.

    A killed run ends when it or its worker is killed. A stopped process does not run, so its span
    ends there; if it continues later, that is another span. A run without an end is still running.

    Args:
        until: When the journal was last read.
    """
    running: dict[str, Event] = {}
    stopped: set[str] = set()
    found: list[Span] = []
    for event in sorted(events, key=lambda event: event.at):
        # A run that had ended before its process was stopped does not continue.
        if event.kind == "start" or (event.kind == "woken" and event.run in stopped):
            running[event.run] = event
        elif event.kind in ENDS and event.run in running:
            began = running.pop(event.run)
            found.append(Span(event.order, event.run, began.at, event.at))
            if event.kind == "stopped":
                stopped.add(event.run)
    found += [Span(event.order, run, event.at, until) for run, event in running.items()]
    return found


def overlaps(found: Iterable[Span]) -> int:
    """The number of pairs of runs of the same order that ran at the same time."""
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


def takeovers(
    events: Collection[Event], found: Collection[Span], kind: Kind = "killed"
) -> list[float]:
    """Seconds from each kill to the next start of a body of its order; infinite if none came."""
    kills = [event for event in events if event.kind == kind]
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
    """One column of the table.

    Attributes:
        doubles: Effects beyond the first of their order.
        charged_again: Orders that have such effects.
    """

    orders: int
    deliveries: int
    bodies: int
    effects: int
    doubles: int
    lost: int
    overlaps: int
    takeovers: Sequence[float]
    worker_takeovers: Sequence[float]
    charged_again: int

    @classmethod
    def of(
        cls, orders: Collection[int], events: Iterable[Event], effects: Sequence[int], until: float
    ) -> Tally:
        """Count one column.

        Args:
            orders: The numbers of the orders that were published.
            events: The events of this column in the journal.
            effects: The order number of every effect in the database.
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
            worker_takeovers=takeovers(events, found, "worker_killed"),
            charged_again=sum(count > 1 for count in times.values()),
        )


def verdict(tallies: Mapping[str, Tally], *, kills: int) -> list[str]:
    """What the demonstration failed to show; empty if it showed everything.

    Args:
        kills: How many child processes of each column should have been killed during a body, in
            addition to one whole worker.
    """
    plain, locked, record = tallies[PLAIN], tallies[LOCKED], tallies[RECORD]
    failures = [
        f"{TITLES[name]}: {len(tally.takeovers)} of {kills} children were killed in a body"
        for name, tally in tallies.items()
        if len(tally.takeovers) != kills
    ]
    failures += [
        f"{TITLES[name]}: no whole worker was killed in a body"
        for name, tally in tallies.items()
        if len(tally.worker_takeovers) != 1
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


def conclusion(tallies: Mapping[str, Tally]) -> str:
    """The table in three sentences; for tallies without a failure."""
    plain, locked = tallies[PLAIN], tallies[LOCKED]
    return (
        f"Plain Celery charged {plain.charged_again} of {plain.orders} orders more than once.\n"
        "The lock alone stopped simultaneous runs, but not double charges: "
        f"{locked.charged_again} orders.\n"
        "Lock and record charged every order once."
    )


def _longest(seconds: Sequence[float]) -> str:
    longest = max(seconds, default=math.inf)
    return "none" if longest == math.inf else f"{longest:.1f} s"


class Row(NamedTuple):
    """One line of the table, and its meaning in plain words.

    Attributes:
        fault: Whether anything but 0 should not have happened.
    """

    name: str
    value: Callable[[Tally], object]
    meaning: str
    fault: bool = False


ROWS = (
    Row("orders", lambda tally: tally.orders, "sent to each task, each to be charged once"),
    Row(
        "deliveries",
        lambda tally: tally.deliveries,
        "messages received, including requeued",
    ),
    Row("bodies run", lambda tally: tally.bodies, "times the task's own code began"),
    Row("effects", lambda tally: tally.effects, "charges in the database"),
    Row(
        "double effects",
        lambda tally: tally.doubles,
        "charges beyond the first of an order",
        fault=True,
    ),
    Row("lost orders", lambda tally: tally.lost, "orders that were never charged", fault=True),
    Row(
        "two runs of one order at once",
        lambda tally: tally.overlaps,
        "how often that happened",
        fault=True,
    ),
    Row(
        "next run after a child is killed",
        lambda tally: _longest(tally.takeovers),
        "longest time until it began",
    ),
    Row(
        "next run after a worker is killed",
        lambda tally: _longest(tally.worker_takeovers),
        "the same; the visibility timeout comes first",
    ),
)


def table(tallies: Mapping[str, Tally]) -> str:
    """The tallies as text of at most 80 columns."""
    rows = [(row.name, [str(row.value(tallies[column])) for column in TITLES]) for row in ROWS]
    names = max(len(name) for name, _ in rows)
    rows = [("", list(TITLES.values())), ("-" * names, ["-" * WIDTH] * len(TITLES)), *rows]
    return "\n".join(
        "  ".join([name.ljust(names), *(cell.rjust(WIDTH) for cell in cells)])
        for name, cells in rows
    )


def markdown(tallies: Mapping[str, Tally]) -> str:
    """The same for a page of the documentation; what went wrong is in bold."""

    def cell(row: Row, column: str) -> str:
        value = row.value(tallies[column])
        return f"**{value}**" if row.fault and value else str(value)

    lines = [["", *TITLES.values()], ["---", *["---:"] * len(TITLES)]]
    lines += [[row.name, *(cell(row, column) for column in TITLES)] for row in ROWS]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |")


def with_table(page: str, tallies: Mapping[str, Tally]) -> str:
    """A page with this table in place of the one between its two comments."""
    table = f"<!-- demonstration -->\n\n{markdown(tallies)}\n\n<!-- end of the demonstration -->"
    return re.sub(
        r"<!-- demonstration -->.*<!-- end of the demonstration -->", table, page, flags=re.DOTALL
    )


def legend(*, redelivers: bool = True) -> str:
    """What each row of the table means.

    Args:
        redelivers: Whether the broker itself redelivers the messages of a killed worker.
    """
    names = max(len(row.name) for row in ROWS)
    lines = [f"{row.name.ljust(names)}  {row.meaning}" for row in ROWS]
    if not redelivers:
        lines[-1] = f"{ROWS[-1].name.ljust(names)}  the same; its messages are sent again first"
    return "\n".join(lines)
