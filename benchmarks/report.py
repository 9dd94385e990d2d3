"""A result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .beds import BEDS
from .budgets import Budget, Verdict
from .model import Metric, Result, RowResult
from .parsers import PARSERS
from .reasons import WHY

UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))

MUCH_STOLEN = 0.01
"""Stolen processor time is reported from this share on."""


def amount(value: float, unit: str = "") -> str:
    """Three digits and a suitable unit: ``"61.3 µs"``, ``"1 240 /s"``, ``"2"``."""
    if unit == "s":
        name, factor = next((u for u in UNITS if abs(value) >= u[1]), UNITS[-1])
        return f"{_digits(value / factor)} {name}"
    return f"{_digits(value)} {unit}".strip()


def _digits(value: float) -> str:
    if value == int(value) or abs(value) >= 100:
        return f"{round(value):,}".replace(",", " ")
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Columns as wide as needed; the first aligned left, the others right."""
    rows = [head, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


# -- rows -----------------------------------------------------------------------------------


def row_table(row: RowResult) -> str:
    """One row: a table for each metric that has a floor; numbers without one are in the first."""
    metrics = [metric for metric in row.metrics if _measured(row, metric)]
    plain = [metric for metric in metrics if metric.floor is None]
    compared = [[metric] for metric in metrics if metric.floor is not None] or [[]]
    compared[0] += plain
    parts = [
        f"{row.name} – {row.title} ({BEDS[row.bed].title}, {PARSERS[row.parser]})",
        *(_metrics_table(row, each) for each in compared),
    ]
    parts += [
        f"{name} cannot: {subject.cannot}"
        for name, subject in row.subjects.items()
        if subject.cannot
    ]
    return "\n".join(parts)


def _metrics_table(row: RowResult, metrics: Sequence[Metric]) -> str:
    head = ["", *(cell for metric in metrics for cell in _head(metric))]
    lines = [
        [name, *(cell for metric in metrics for cell in _cells(row, name, metric))]
        for name in row.subjects
    ]
    return table(head, [line for line in lines if any(line[1:])])


def _measured(row: RowResult, metric: Metric) -> bool:
    return any(metric.name in subject.series for subject in row.subjects.values())


def _head(metric: Metric) -> list[str]:
    name = metric.name.replace("_", " ")
    if metric.floor is None:
        return [name, *(f"p{rank}" for rank in metric.percentiles)]
    return [
        name,
        f"× {metric.floor}",
        "quartiles",
        "min–max",
        *(cell for rank in metric.percentiles for cell in (f"p{rank}", "×")),
    ]


def _cells(row: RowResult, subject: str, metric: Metric) -> list[str]:
    series, compared = row.series(subject, metric.name), row.compared(subject, metric.name)
    if series is None:
        return [""] * len(_head(metric))
    cells = [amount(series.spread.median, metric.unit)]
    ranks = [str(rank) for rank in metric.percentiles]
    if metric.floor is None:
        return cells + [
            amount(series.percentiles[rank], metric.unit) if rank in series.percentiles else ""
            for rank in ranks
        ]
    if compared is None:
        return cells + [""] * (len(_head(metric)) - 1)
    spread = compared.spread
    cells += [
        f"{spread.median:.2f}",
        f"{spread.low_quartile:.2f}–{spread.high_quartile:.2f}",
        f"{spread.min:.2f}–{spread.max:.2f}",
    ]
    for rank in ranks:
        if rank in compared.percentiles:
            cells += [amount(series.percentiles[rank], metric.unit)]
            cells += [f"{compared.percentiles[rank]:.2f}"]
        else:
            cells += ["", ""]
    return cells


# -- verdicts -------------------------------------------------------------------------------


def verdict_lines(verdicts: Sequence[Verdict], result: Result) -> str:
    """The budgets: measured values, limits, verdicts, and the peers that are ahead."""
    lines = []
    for verdict in verdicts:
        budget = verdict.budget
        unit = _unit(budget, result)
        lines.append(
            [
                f"{budget.row}: {budget.metric.replace('_', ' ')}, {budget.statistic}",
                "–" if verdict.value is None else unit(verdict.value),
                f"at {budget.at} {unit(budget.limit)}",
                "" if budget.aim is None else unit(budget.aim),
                _judgement(verdict),
            ]
        )
    told = table(["budget", "measured", "limit", "aim", "verdict"], lines)
    ahead = [
        f"{verdict.budget.row}, {verdict.budget.metric.replace('_', ' ')} "
        f"({verdict.budget.statistic}): ahead of us "
        + ", ".join(
            f"{name} ({_unit(verdict.budget, result)(value)})"
            for name, value in verdict.peers_ahead
        )
        for verdict in verdicts
        if verdict.peers_ahead
    ]
    leaders = {name for verdict in verdicts for name, _ in verdict.peers_ahead}
    reasons = [f"  {name}: {WHY[name]}" for name in sorted(leaders & WHY.keys())]
    if not ahead:
        ahead = ["No peer is ahead in any row."]
    return "\n".join([told, "", *ahead, *(["Why they may be:"] if reasons else []), *reasons])


def _unit(budget: Budget, result: Result) -> Callable[[float], str]:
    row = result.rows[budget.row]
    metric = next((metric for metric in row.metrics if metric.name == budget.metric), None)
    if metric is None or (metric.floor is not None and budget.compared):
        return lambda value: f"{value:.2f} ×"
    return lambda value: amount(value, metric.unit)


def _judgement(verdict: Verdict) -> str:
    if verdict.value is None:
        return "NOT MEASURED"
    if not verdict.holds:
        return f"BEHIND by {-verdict.ahead:.0%}" if verdict.budget.limit else "BEHIND"
    said = f"holds, ahead by {verdict.ahead:.0%}" if verdict.ahead > 0 else "holds"
    return f"{said}, aim reached" if verdict.reached_aim else said


def render(result: Result, verdicts: Sequence[Verdict]) -> str:
    """The whole report."""
    parts = [_about(result), *map(row_table, result.rows.values())]
    parts.append(_options(result))
    if verdicts:
        parts.append(verdict_lines(verdicts, result))
    stolen = result.environment.get("stolen") or 0.0
    if stolen >= MUCH_STOLEN:
        parts.append(
            f"The host of this machine kept {stolen:.0%} of the wanted processor time for others, "
            "so the numbers depend on the host, too."
        )
    return "\n\n".join(parts)


def _about(result: Result) -> str:
    about = result.environment
    quick = " (a quick run: the numbers are rough)" if result.quick else ""
    return (
        f"{result.started}{quick}: {about['python']}, Redis {about['redis_server']}, "
        f"redis-py {about['packages']['redis']}, {about['cpus']} CPUs, "
        f"load {about['load_at_start']} at the start"
    )


def _options(result: Result) -> str:
    """How each subject was configured, and in which rows."""
    told: dict[tuple[str, str], set[str]] = {}
    for row in result.rows.values():
        for name, subject in row.subjects.items():
            told.setdefault((name, subject.options), set()).add(row.name.partition(".")[0])
    lines = [
        f"  {name}: {options} ({', '.join(sorted(rows))})" for (name, options), rows in told.items()
    ]
    return "\n".join(["How they were set up:", *sorted(lines)])
