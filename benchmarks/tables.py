"""A result as Markdown for the documentation; only the reasons are written by hand."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .beds import BEDS
from .budgets import Budget, Verdict, judge
from .model import OURS, Metric, Result, RowResult
from .parsers import PARSERS, PYTHON
from .peers import BARE, REACHED
from .reasons import WHY
from .report import amount
from .rows.cycle import NAMES, row_name
from .rows.scale import OPERATIONS, SIZES

_IMPORTED = "its module had already been imported, or is the only one of its package"


def _why(budget: Budget, peer: str) -> str:
    return _IMPORTED if budget.row == "import" else WHY[peer.partition(",")[0]]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """The first column aligned left, the others right unless they are ``words``."""
    rows = [head, ["---", *["---" if words else "---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(value: float) -> str:
    return _whole(f"{value:.0f} ×" if value >= 100 else f"{value:.2f} ×")


def _amount(value: float, unit: str = "") -> str:
    return _whole(amount(value, unit))


def _whole(text: str) -> str:
    """The text with spaces at which a line does not break."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _plain(name: str) -> str:
    return name.replace("_", " ")


# -- conditions ----------------------------------------------------------------


def environment(result: Result) -> str:
    """The conditions of the measurement."""
    about = result.environment
    packages = [
        f"{name} {version}"
        for name, version in about["packages"].items()
        if version and name != OURS
    ]
    quick = "A quick run, whose numbers are rough. " if result.quick else ""
    postgres = f", PostgreSQL {about['postgresql']}" if about["postgresql"] else ""
    stolen = about.get("stolen")
    kept = "" if stolen is None else f"; the host kept {stolen:.1%} of the requested processor time"
    return (
        f"{quick}django-dlock {about['packages'][OURS]} on {result.started.partition('T')[0]}: "
        f"{about['python']}, Redis {about['redis_server']}{postgres}; {', '.join(packages)}; "
        f"{about['cpus']} CPUs ({about['processor'] or about['system']}); "
        f"load {about['load_at_start']} at the start{kept}."
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
    """Measured values, limits and aims."""
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
    """Where a peer does better, and why: one line for each peer."""
    found: dict[str, list[tuple[Budget, float, float]]] = {}
    for verdict in judge(result.rows.values()):
        for name, theirs in verdict.peers_ahead:
            if verdict.value is not None:
                one = (verdict.budget, theirs, verdict.value)
                found.setdefault(name.partition(",")[0], []).append(one)
    if not found:
        return "No peer is ahead in any row that has a budget."
    head = ["", "figures", "the largest difference, theirs against ours", "why"]
    return _table(head, [_line(name, better, result) for name, better in found.items()], words=True)


def _line(peer: str, better: Sequence[tuple[Budget, float, float]], result: Result) -> list[str]:
    counts = Counter(budget.row.removeprefix("db.").partition(".")[0] for budget, *_ in better)
    figures = ", ".join(f"{count} of `{rows}`" for rows, count in counts.items())
    budget, *values = max(better, key=_difference)
    shown = " against ".join(_shown(budget, result, value) for value in values)
    reasons = dict.fromkeys(_why(one, peer) for one, *_ in better)
    return [peer, figures, f"{_what(budget, result)}: {shown}", "; ".join(reasons)]


def _difference(better: tuple[Budget, float, float]) -> float:
    """How many times better theirs is; an import that costs nothing is not compared."""
    budget, theirs, ours = better
    one, other = (ours, theirs) if budget.at == "most" else (theirs, ours)
    return one / other if other and budget.row != "import" else 0.0


# -- beds -----------------------------------------------------------------------------------


def beds(result: Result) -> str:
    """A cycle on each bed, without and with hiredis, beside the peers."""
    measured = [
        (bed, parser, found)
        for bed, parser in itertools.product(BEDS.values(), PARSERS)
        if len(found := _cycles(result, bed.name, parser)) == len(NAMES)
    ]
    if not measured:
        return "Not measured."
    subjects = [
        name
        for name, subject in measured[0][2][0].subjects.items()
        if subject.role != "floor" and not subject.cannot
    ]
    parts = []
    for metric, title in (("latency", "Latency"), ("cpu", "Processor time of client and server")):
        lines = [
            [
                f"{bed.title}, {PARSERS[parser]}",
                *(_median(found[0], floor, metric) for floor in (REACHED, BARE)),
                *(_cycle_cell(found, name, metric) for name in subjects),
                _cycle_limit(found[0], metric),
            ]
            for bed, parser, found in measured
        ]
        head = ["", REACHED, BARE, *(f"{name} ÷" for name in subjects), f"limit for {OURS} ÷"]
        parts.append(f"{title}; the same name / a new name each time:\n\n{_table(head, lines)}")
    return "\n\n".join(parts)


def _cycles(result: Result, bed: str, parser: str) -> list[RowResult]:
    """The row for each kind of names, if it exists."""
    found = (result.rows.get(row_name(bed, names, parser)) for names in NAMES)
    return [row for row in found if row is not None and row.compared(OURS, "latency")]


def _median(row: RowResult, subject: str, metric: str) -> str:
    series = row.series(subject, metric)
    return (
        ""
        if series is None or not series.rounds
        else _amount(series.spread.median, row.metric(metric).unit)
    )


def _cycle_cell(rows: Sequence[RowResult], subject: str, metric: str) -> str:
    medians = [
        None if (series := row.compared(subject, metric)) is None else series.spread.median
        for row in rows
    ]
    told = " / ".join("–" if median is None else f"{median:.2f}" for median in medians)
    late = subject == OURS and any(
        not verdict.holds for verdict in judge(rows) if verdict.budget.metric == metric
    )
    return _whole(f"**{told}**" if late else told)


def _cycle_limit(row: RowResult, metric: str) -> str:
    limits = [verdict.budget.limit for verdict in judge([row]) if verdict.budget.metric == metric]
    return _whole(" ".join(f"≤ {limit:.2f}" for limit in limits))


# -- costs ----------------------------------------------------------------------------------

COSTS = {
    row_name("idle", "same", PYTHON): "acquire and release, nobody waits",
    "handover.slept": "an acquire that waits, and the release that ends the wait (commands are "
    "counted from the release on)",
    "renewal.10000": "renewing 10 000 leases once",
}


def costs(result: Result) -> str:
    """The cost of each of our operations in round trips, commands and processor time."""
    lines = [
        [title, *(_median(row, OURS, metric) for metric in ("round_trips", "at_server", "cpu"))]
        for name, title in COSTS.items()
        if (row := result.rows.get(name)) is not None
    ]
    head = ["", "round trips", "commands at the server", "processor time of client and server"]
    return _table(head, lines) if lines else "Not measured."


# -- in plain words -------------------------------------------------------------------------


PLAIN = {
    row_name("idle", "same", PYTHON): "taking and releasing a free lock on Redis",
    "handover.slept": "from a release until a waiter in another process has the lock",
    "db.cycle.same": "taking and releasing a free lock in PostgreSQL",
    "db.cycle.sqlite": "the same in SQLite",
    "task": "running an empty Celery task under a lock",
}


def plain(result: Result) -> str:
    """What somebody who does not compare wants to know: times, and how busy the machine was."""
    whole = result.environment
    lines = []
    for name, title in PLAIN.items():
        row = result.rows.get(name)
        if row is not None and (time := _median(row, OURS, _time(row))):
            about = whole.get("added", {}).get(name, whole)
            floor = row.metric(_time(row)).floor
            least = "" if floor is None else f"{_median(row, floor, _time(row))} ({floor})"
            lines.append([title, time, least, f"{about['load_at_start']:g}"])
    head = ["", "django-dlock", "the least that it could take", "load before the run"]
    return _table(head, lines) if lines else "Not measured."


def _time(row: RowResult) -> str:
    """The metric that is the time of one operation."""
    return next((metric.name for metric in row.metrics if metric.unit == "s"), "latency")


# -- rows -----------------------------------------------------------------------------------


def rows(result: Result) -> str:
    """Every row with every subject, and when it was measured."""
    return _with_beds(
        result,
        lambda row: (
            not row.family and row.name != "scale" and not row.name.startswith(("db.", "stores."))
        ),
    )


def database(result: Result) -> str:
    """The rows about leases in a database, and the systems they were measured on."""
    return _with_beds(result, lambda row: row.name.startswith("db."))


def stores(result: Result) -> str:
    """The rows about other stores; as ``database``."""
    return _with_beds(result, lambda row: row.name.startswith("stores."))


def _with_beds(result: Result, chosen: Callable[[RowResult], bool]) -> str:
    whole = {**result.environment, "started": result.started, "quick": result.quick}
    added, parts, told = result.environment.get("added", {}), list[str](), ""
    for row in result.rows.values():
        if chosen(row):
            bed = _bed(added.get(row.name, whole))
            # Once for successive rows of one run.
            parts += [_row(row)] if bed == told else [bed, _row(row)]
            told = bed
    return "\n\n".join(parts) or "Not measured."


def _bed(about: Mapping[str, Any]) -> str:
    quick = ", a quick run" if about["quick"] else ""
    stores = {"Redis": about["redis_server"], **(about.get("stores") or {})}
    servers = [f"{name} {version}" for name, version in stores.items()]
    if about["postgresql"]:
        servers.append(f"PostgreSQL {about['postgresql']} with fsync off")
    return (
        f"Measured on {about['started'].partition('T')[0]}{quick}: {', '.join(servers)}; "
        f"load {about['load_at_start']} at "
        f"the start; the host kept {about['stolen'] or 0:.1%} of the requested processor time."
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
    where = f"{BEDS[row.bed].title}, {PARSERS[row.parser]}"
    parts = [f"**`{row.name}`**: {row.title} ({where})", _table(head, lines)]
    parts += [
        f"{name} has no figures: {subject.cannot}."
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
    """The kind of growth, if the last costs ``times`` as much as the first.

    So few points with noise allow only one of these answers.
    """
    rise, most = costs[-1] / costs[0], max(costs) / costs[0]
    if rise > 1 + 2 * math.log10(times):
        return "linear"
    if rise > 2:
        return "logarithmic"
    return "constant" if most <= 3 else "bounded"


def scale(result: Result) -> str:
    """Each operation among more and more held locks: its time, and its processor time."""
    row = result.rows.get("scale")
    if row is None:
        return "Not measured."
    sizes = [name for name, subject in row.subjects.items() if subject.role != "peer"]
    # A non-breaking space holds digits together; a line may break at any other space.
    heads = [re.sub(r"(?<=\d) (?=\d)", _whole(" "), size.removeprefix("among ")) for size in sizes]
    stops = [_amount(stop, "s") for stop in _medians(row, "longest_stop", sizes)]
    memory = [_whole(f"{size:,.0f} B".replace(",", " ")) for size in _medians(row, "memory", sizes)]
    lines = [
        *_growing(row, sizes, ""),
        ["longest stop of the server", *stops, ""],
        ["server's memory per lock", *[""] * (len(sizes) - len(memory)), *memory, ""],
    ]
    parts = [_table(["", *heads, "growth"], lines)]
    spent = _growing(row, sizes, "_cpu")
    if spent:
        parts += ["Processor time of client and server:", _table(["", *heads, "growth"], spent)]
    return "\n\n".join(parts)


def _growing(row: RowResult, sizes: Sequence[str], suffix: str) -> list[list[str]]:
    """A line for each measured operation."""
    lines = []
    for name, title in OPERATIONS.items():
        costs = _medians(row, f"{name}{suffix}", sizes)
        if costs:
            shown = [_amount(cost, "s") for cost in costs]
            lines.append([title, *shown, growth(costs, SIZES[-1] / SIZES[0])])
    return lines


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
    "plain": plain,
    "budgets": budgets,
    "ahead": ahead,
    "beds": beds,
    "costs": costs,
    "rows": rows,
    "scale": scale,
    "database": database,
    "stores": stores,
}
"""Made from the newest release; ``releases`` is made from all."""

TITLES = {
    "budgets": "Figures and their limits",
    "beds": "One cycle on each bed",
    "rows": "All rows on Redis",
    "scale": "The cost with many locks",
    "database": "Leases in a database",
    "stores": "Leases in other stores",
    "releases": "Release by release",
}
"""Of the tables that are pages; pages of the documentation include the others."""


def all_tables(results: Mapping[str, Result]) -> dict[str, str]:
    """By name, pages with their titles; ``results`` by version, the newest last."""
    newest = list(results.values())[-1]
    told = {name: make(newest) for name, make in TABLES.items()} | {"releases": releases(results)}
    return {name: _titled(name, text) for name, text in told.items()}


def _titled(name: str, text: str) -> str:
    title = TITLES.get(name)
    return f"# {title}\n\n[How to read it](README.md)\n\n{text}" if title else text
