"""A result as Markdown, for the documentation: nothing in it is typed by hand but the reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from .budgets import Budget, Verdict, judge
from .model import OURS, Metric, Result, RowResult
from .reasons import WHY
from .report import amount
from .rows.scale import OPERATIONS, SIZES

__all__ = ["TABLES", "all_tables", "growth"]

_IMPORTED = "the module is part of what was imported before, or all there is of the package"


def _why(budget: Budget, peer: str) -> str:
    return _IMPORTED if budget.row == "import" else WHY[peer.partition(",")[0]]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """The first column to the left, and the others to the right unless they are ``words``."""
    rows = [head, ["---", *["---" if words else "---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(value: float) -> str:
    return _whole(f"{value:.0f} ×" if value >= 100 else f"{value:.2f} ×")


def _amount(value: float, unit: str = "") -> str:
    return _whole(amount(value, unit))


def _whole(text: str) -> str:
    """Not to be broken between two lines."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _plain(name: str) -> str:
    return name.replace("_", " ")


# -- what was measured where ----------------------------------------------------------------


def environment(result: Result) -> str:
    """With what it was measured."""
    about = result.environment
    packages = [
        f"{name} {version}"
        for name, version in about["packages"].items()
        if version and name != OURS
    ]
    quick = "A quick run, whose numbers are rough. " if result.quick else ""
    postgres = f", PostgreSQL {about['postgresql']}" if about["postgresql"] else ""
    stolen = about.get("stolen")
    kept = "" if stolen is None else f"; the host kept {stolen:.1%} of the processor time wanted"
    return (
        f"{quick}django-dlock {about['packages'][OURS]} on {result.started.partition('T')[0]}: "
        f"{about['python']}, Redis {about['redis_server']}{postgres}; {', '.join(packages)}; "
        f"{about['cpus']} CPUs ({about['processor'] or about['system']}){kept}."
    )


# -- budgets --------------------------------------------------------------------------------


def _shown(budget: Budget, result: Result, value: float) -> str:
    metric = _metric(budget, result)
    if metric is not None and (metric.floor is None or not budget.compared):
        return _amount(value, metric.unit)
    return _ratio(value)


def _metric(budget: Budget, result: Result) -> Metric | None:
    metrics = result.rows[budget.row].metrics
    return next((metric for metric in metrics if metric.name == budget.metric), None)


def _measured(verdict: Verdict, result: Result) -> str:
    if verdict.value is None:
        return "not measured"
    shown = _shown(verdict.budget, result, verdict.value)
    return shown if verdict.holds else f"**{shown}**"


def _what(budget: Budget, result: Result) -> str:
    metric = _metric(budget, result)
    floor = f" ÷ {metric.floor}" if metric and metric.floor and budget.compared else ""
    return f"`{budget.row}` {_plain(budget.metric)}{floor}, {budget.statistic}"


def _limit(budget: Budget, result: Result) -> str:
    sign = {"most": "≤", "least": "≥"}[budget.at]
    return _whole(f"{sign} {_shown(budget, result, budget.limit)}")


def budgets(result: Result) -> str:
    """What was measured, what is allowed and what is hoped for."""
    return _table(
        ["", "measured", "limit", "aim"],
        [
            [
                _what(verdict.budget, result),
                _measured(verdict, result),
                _limit(verdict.budget, result),
                ""
                if verdict.budget.aim is None
                else _shown(verdict.budget, result, verdict.budget.aim),
            ]
            for verdict in judge(result.rows.values())
        ],
    )


def ahead(result: Result) -> str:
    """Where a peer does better, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for verdict in judge(result.rows.values()):
        budget, ours = verdict.budget, verdict.value
        for name, theirs in verdict.peers_ahead:
            if ours is not None:
                shown = (_shown(budget, result, value) for value in (theirs, ours))
                where = f"{_what(budget, result)}: {' against '.join(shown)}"
                found.setdefault((name, _why(budget, name)), []).append(where)
    if not found:
        return "None is, in any row that has a budget."
    lines = [[name, "<br>".join(where), why] for (name, why), where in found.items()]
    return _table(["", "where, theirs against ours", "why"], lines, words=True)


# -- rows -----------------------------------------------------------------------------------


def rows(result: Result) -> str:
    """Every row with every subject."""
    return "\n\n".join(
        _row(row) for row in result.rows.values() if not row.family and row.name != "scale"
    )


def _row(row: RowResult) -> str:
    metrics = [
        metric
        for metric in row.metrics
        if any(metric.name in subject.series for subject in row.subjects.values())
    ]
    head = ["", *(cell for metric in metrics for cell in _head(metric))]
    lines = [
        [name, *(cell for metric in metrics for cell in _cells(row, name, metric))]
        for name, subject in row.subjects.items()
        if not subject.cannot
    ]
    parts = [f"**`{row.name}`**: {row.title}", _table(head, lines)]
    parts += [
        f"{name} could not take part: {subject.cannot}."
        for name, subject in row.subjects.items()
        if subject.cannot
    ]
    return "\n\n".join(parts)


def _head(metric: Metric) -> list[str]:
    name = _plain(metric.name)
    if metric.floor is None:
        return [name]
    return [name, f"÷ {metric.floor} (quartiles)", *(f"p{rank} ÷" for rank in metric.percentiles)]


def _cells(row: RowResult, subject: str, metric: Metric) -> list[str]:
    series, compared = row.series(subject, metric.name), row.compared(subject, metric.name)
    if series is None:
        return [""] * len(_head(metric))
    cells = [_amount(series.spread.median, metric.unit)]
    if metric.floor is None:
        return cells
    if compared is None:
        return cells + [""] * (len(_head(metric)) - 1)
    spread = compared.spread
    quartiles = f"{spread.low_quartile:.2f}–{spread.high_quartile:.2f}"
    cells.append(f"{_ratio(spread.median)} ({quartiles})")
    percentiles = (compared.percentiles.get(str(rank)) for rank in metric.percentiles)
    return cells + ["" if value is None else _ratio(value) for value in percentiles]


# -- cost of n ------------------------------------------------------------------------------


def growth(costs: Sequence[float], times: float) -> str:
    """How something grows that costs the last for ``times`` as many as when it costs the first.

    Of so few points, with their noise, no more can be said than one of these.
    """
    rise, most = costs[-1] / costs[0], max(costs) / costs[0]
    if rise > 1 + 2 * math.log10(times):
        return "linear"
    if rise > 2:
        return "logarithmic"
    return "constant" if most <= 3 else "bounded"


def scale(result: Result) -> str:
    """Each operation among more and more held locks."""
    row = result.rows.get("scale")
    if row is None:
        return "Not measured."
    sizes = [name for name, subject in row.subjects.items() if subject.role != "peer"]
    lines = []
    for name, title in OPERATIONS.items():
        costs = _medians(row, name, sizes)
        told = [_amount(cost, "s") for cost in costs]
        lines.append([title, *told, growth(costs, SIZES[-1] / SIZES[0]) if costs else ""])
    stops = [_amount(stop, "s") for stop in _medians(row, "longest_stop", sizes)]
    lines.append(["longest stop of the server", *stops, ""])
    memory = [_whole(f"{size:,.0f} B".replace(",", " ")) for size in _medians(row, "memory", sizes)]
    lines.append(["server's memory per lock", *[""] * (len(sizes) - len(memory)), *memory, ""])
    # A space between digits holds them together, any other is one to break at.
    heads = (re.sub(r"(?<=\d) (?=\d)", _whole(" "), size.removeprefix("among ")) for size in sizes)
    return _table(["", *heads, "growth"], lines)


def _medians(row: RowResult, metric: str, sizes: Sequence[str]) -> list[float]:
    found = (row.series(size, metric) for size in sizes)
    return [one.spread.median for one in found if one is not None]


# -- releases -------------------------------------------------------------------------------


def releases(results: Mapping[str, Result]) -> str:
    """The budgets' numbers, release by release."""
    told: dict[str, dict[str, str]] = {}
    for version, result in results.items():
        for verdict in judge(result.rows.values()):
            told.setdefault(_what(verdict.budget, result), {})[version] = _measured(verdict, result)
    return _table(
        ["", *results],
        [[what, *(by.get(version, "") for version in results)] for what, by in told.items()],
    )


TABLES = {
    "environment": environment,
    "budgets": budgets,
    "ahead": ahead,
    "rows": rows,
    "scale": scale,
}
"""Of the newest release; ``releases`` is made of all."""


def all_tables(results: Mapping[str, Result]) -> dict[str, str]:
    """By name; ``results`` by version, the newest last."""
    newest = list(results.values())[-1]
    told = {name: make(newest) for name, make in TABLES.items()}
    return {**told, "releases": releases(results)}
