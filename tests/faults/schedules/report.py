"""Makes the tables: one row for each store, then store × fault × grants × violations."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..suite.journal import Event
from .checker import Row, Violation, check, tally

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
    """Markdown: a row for each store, and a table for each store."""
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
        *_summary(outcomes),
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


def _summary(outcomes: Sequence[Outcome]) -> list[str]:
    """One row for each store."""
    lines = [
        "| store | version | minutes | seed | faults | grants | violations |",
        "| --- | --- | ---: | --- | ---: | ---: | --- |",
    ]
    for one in outcomes:
        total = _sum(one.rows)
        lines.append(
            f"| {one.store} | {one.versions} | {one.minutes:g} | `{one.seed}` | {total.times} "
            f"| {total.grants} | {_wrong(total)} |"
        )
    return lines


def _row(row: Row) -> str:
    return f"| {row.fault} | {row.times} | {row.grants} | {_wrong(row)} |"


def _wrong(row: Row) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(row.violations.items())) or "0"


def _sum(rows: Sequence[Row]) -> Row:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.violations)
    return Row("**all**", sum(row.times for row in rows), sum(row.grants for row in rows), total)
