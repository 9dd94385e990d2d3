"""Two results side by side, and the differences that are larger than the spread of the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .model import Metric, Result, RowResult, Series
from .report import MUCH_STOLEN, amount, table


@dataclass(frozen=True)
class Move:
    """One metric of one subject in two results; the ratio, if it has a floor.

    Attributes:
        change: Relative to the first; positive is more.
        direction: ``better`` or ``worse`` if the middle halves of the rounds do not overlap,
            ``same`` otherwise.
    """

    row: str
    subject: str
    metric: Metric
    first: Series
    second: Series
    change: float
    direction: str


def moves(first: Result, second: Result) -> Iterator[Move]:
    """All pairs that both results have."""
    for name, row in first.rows.items():
        other = second.rows.get(name)
        if other is None:
            continue
        for subject in row.subjects:
            for metric in row.metrics:
                if metric.floor == subject or not _same(metric, other):
                    continue
                move = _move(row, other, subject, metric)
                if move is not None:
                    yield move


def _same(metric: Metric, other: RowResult) -> bool:
    return any(
        (metric.name, metric.unit, metric.floor) == (its.name, its.unit, its.floor)
        for its in other.metrics
    )


def _move(row: RowResult, other: RowResult, subject: str, metric: Metric) -> Move | None:
    first, second = row.compared(subject, metric.name), other.compared(subject, metric.name)
    if first is None or second is None:
        return None
    one, two = first.spread, second.spread
    change = (two.median - one.median) / one.median if one.median else two.median - one.median
    direction = "same"
    if two.low_quartile > one.high_quartile:
        direction = "worse" if metric.better == "lower" else "better"
    elif two.high_quartile < one.low_quartile:
        direction = "better" if metric.better == "lower" else "worse"
    return Move(row.name, subject, metric, first, second, change, direction)


def render(first: Result, second: Result) -> str:
    """All of them as a table, with a list of the changes below."""
    found = list(moves(first, second))
    parts = [f"A {first.started}", f"B {second.started}", *_warnings(first, second), ""]
    parts.append(
        table(
            ["row, subject", "metric", "A", "quartiles", "B", "quartiles", "B to A", ""],
            [_line(move) for move in found],
        )
    )
    moved = [move for move in found if move.direction != "same"]
    parts += ["", "Moved beyond the spread:" if moved else "Nothing moved beyond the spread."]
    parts += [
        f"  {move.row}, {move.subject}: {move.metric.name.replace('_', ' ')} is {move.direction}, "
        f"{_shown(move, move.first.spread.median)} → {_shown(move, move.second.spread.median)}"
        for move in moved
    ]
    gone = [name for name in first.rows if name not in second.rows]
    new = [name for name in second.rows if name not in first.rows]
    parts += [f"Only in A: {', '.join(gone)}"] * bool(gone)
    parts += [f"Only in B: {', '.join(new)}"] * bool(new)
    return "\n".join(parts)


def _warnings(first: Result, second: Result) -> list[str]:
    one, two = first.environment, second.environment
    differ = [
        f"{name}: {one.get(name)} → {two.get(name)}"
        for name in ("python", "system", "processor", "cpus", "redis_server", "postgresql")
        if one.get(name) != two.get(name)
    ]
    versions = one.get("packages", {}), two.get("packages", {})
    differ += [
        f"{name}: {versions[0].get(name)} → {versions[1].get(name)}"
        for name in sorted({*versions[0], *versions[1]})
        if versions[0].get(name) != versions[1].get(name)
    ]
    stolen = [each.get("stolen") or 0.0 for each in (one, two)]
    if max(stolen) >= MUCH_STOLEN:
        differ.append(f"what the host kept for others: {stolen[0]:.0%} → {stolen[1]:.0%}")
    if first.quick != second.quick:
        differ.append("one of them is a quick run")
    return [f"They differ in {fact}" for fact in differ]


def _line(move: Move) -> list[str]:
    one, two = move.first.spread, move.second.spread
    return [
        f"{move.row}, {move.subject}",
        move.metric.name.replace("_", " "),
        _shown(move, one.median),
        f"{_shown(move, one.low_quartile)}–{_shown(move, one.high_quartile)}",
        _shown(move, two.median),
        f"{_shown(move, two.low_quartile)}–{_shown(move, two.high_quartile)}",
        f"{move.change:+.0%}",
        "" if move.direction == "same" else move.direction,
    ]


def _shown(move: Move, value: float) -> str:
    if move.metric.floor is not None:
        return f"{value:.2f} ×"
    return amount(value, move.metric.unit)
