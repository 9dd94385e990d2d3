"""Makes the tables: store × fault × grants × violations, and one row for each store."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..suite.journal import Event
from .checker import Row, Violation, check, tally

__all__ = ["Outcome", "outcome_of", "overview", "table"]

TOLD_LATE = (
    "the store lost its data or its clock leapt ahead, two held, and the first one was not told by "
    "its next renewal, or by its deadline while it could not renew"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, as its history tells it.

    Attributes:
        versions: The servers' program and its version.
        settings: Of the alias.
    """

    store: str
    versions: str
    settings: str
    seed: str
    minutes: float
    rows: Sequence[Row]
    violations: Sequence[Violation]


def outcome_of(events: Collection[Event]) -> Outcome:
    """Judge a history."""
    (bed,) = [event for event in events if event["event"] == "bed"]
    settings = f"TTL {bed['ttl']:g} s, `command_timeout` {bed['command_timeout']:g} s"
    facts = bed["store"], bed["versions"], settings, bed["seed"], bed["seconds"] / 60
    return Outcome(*facts, tally(events), check(events))


def table(outcomes: Sequence[Outcome], crew: str) -> str:
    """Markdown for contributors: one table for each store."""
    bed = f"{os.cpu_count()} processors, Python {platform.python_version()}, {platform.system()}"
    lines = [
        "<!-- Written by `make schedules`; do not edit. -->",
        "",
        "# What schedules of faults drawn at random found",
        "",
        "For each store, faults were drawn from a seed, and made one after another to real",
        f"servers, while clients acquired, held and released locks: {crew}.",
        "Everybody wrote down what was granted, held, released and lost, and when, by one clock.",
        "A checker then looked for these violations:",
        "",
        "| violation | what must not happen |",
        "| --- | --- |",
        "| overlap | two hold one name at the same time, though the store kept its data |",
        f"| told late | {TOLD_LATE} |",
        "| token | a later grant has no higher token |",
        "| loss | a lease was lost though nothing kept its renewals from the store |",
        "| outage | a caller with patience was told of an outage, though there was none |",
        "| stuck | a process got no answer for long, while another one did |",
        "| bound | a call took longer than its patience, `command_timeout` and a second |",
        "| liveness | the fault was over, and a name was not granted in time |",
        "| progress | a client never got a lock, or no answer after the last fault |",
        "| error | a call raised another error than `LeaseLost` or `BackendUnavailable` |",
        "",
        f"The bed: {bed}. A seed repeats a schedule; what a fault met depends on the moment.",
        "",
    ]
    for one in outcomes:
        lines += [
            f"## {one.store}",
            "",
            f"{one.versions}; {one.settings}; {one.minutes:g} minutes, seed `{one.seed}`.",
            "",
            "| fault | times | grants | violations |",
            "| --- | ---: | ---: | --- |",
            *(_row(row) for row in one.rows),
            _row(_sum(one.rows)),
            "",
        ]
    return "\n".join(lines)


def overview(outcomes: Sequence[Outcome], crew: str) -> str:
    """Markdown for the manual: one row for each store."""
    lines = [
        "<!-- Written by `make schedules`; do not edit. -->",
        "",
        "# What schedules of faults drawn at random found",
        "",
        (
            "For each store, faults were drawn from a seed, and made one after another: "
            "connections cut, refused, half-open, slow or forgotten; real servers paused, killed, "
            "restarted empty or failed over; clocks set; clients paused or killed."
        ),
        f"Meanwhile clients acquired, held and released locks: {crew}.",
        (
            "A checker then looked for violations: two holders at a time, a loss that was told "
            "late or had no cause, a token that did not rise, an outage that was none, a call past "
            "its bound, a name that was not granted in time after the fault, a client that got no "
            "answer, and any unexpected error."
        ),
        "",
        "| store | version | minutes | seed | faults | grants | violations |",
        "| --- | --- | ---: | --- | ---: | ---: | --- |",
    ]
    for one in outcomes:
        total = _sum(one.rows)
        lines.append(
            f"| {one.store} | {one.versions} | {one.minutes:g} | `{one.seed}` | {total.times} "
            f"| {total.grants} | {_wrong(total)} |"
        )
    lines += ["", "`contributing/schedules-table.md` in the repository has each kind of fault.", ""]
    return "\n".join(lines)


def _row(row: Row) -> str:
    return f"| {row.fault} | {row.times} | {row.grants} | {_wrong(row)} |"


def _wrong(row: Row) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(row.violations.items())) or "0"


def _sum(rows: Sequence[Row]) -> Row:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.violations)
    return Row("**all**", sum(row.times for row in rows), sum(row.grants for row in rows), total)
