"""The budgets, which limit what the benchmark measures, and the verdicts on them.

If a row or metric named here was not measured, its budget does not hold, unless the row was not
chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .model import OURS, RowResult
from .parsers import HIREDIS, PARSERS
from .rows.cycle import NAMES, row_name


@dataclass(frozen=True)
class Budget:
    """A limit on one statistic of one metric of django-dlock.

    Attributes:
        statistic: ``median``, ``min`` or ``max`` of the rounds, ``p90`` of the raw samples; of the
            ratio if the metric has a floor.
        at: Whether the limit is the most or the least allowed.
        aim: A goal beyond the limit.
        compared: Whether the ratio to the metric's floor counts, or the number itself.
        among_peers: Whether peers that are ahead are listed.
    """

    row: str
    metric: str
    at: Literal["most", "least"]
    limit: float
    statistic: str = "median"
    aim: float | None = None
    subject: str = OURS
    compared: bool = True
    among_peers: bool = True

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at == "most" else value >= self.limit

    def better(self, one: float, other: float) -> bool:
        return one < other if self.at == "most" else one > other


@dataclass(frozen=True)
class Verdict:
    """The result of a run for one budget.

    Attributes:
        value: ``None`` if it was not measured.
        ahead: By what fraction of the limit it is better; negative if it is worse.
        peers_ahead: Name and value of each peer that does better, the best first.
    """

    budget: Budget
    value: float | None
    holds: bool
    ahead: float
    reached_aim: bool | None
    peers_ahead: tuple[tuple[str, float], ...]


MANY = "among 100 000 and 1 000 000 other keys"
"""Subject of the row ``scale``."""

CYCLE = {
    # Bed: the most latency and the most processor time, compared with two bare commands.
    "idle": (0.85, 1.30),
    "busy": (1.15, 1.15),
    "distant-0.3": (1.10, 1.15),
    "distant-1": (1.10, 1.15),
}
HIREDIS_EXTRA = 0.15
"""Added to both limits with hiredis, which makes the bare commands cheaper."""


def _cycle() -> Iterator[Budget]:
    for bed, parser, names in itertools.product(CYCLE, PARSERS, NAMES):
        row, extra = row_name(bed, names, parser), HIREDIS_EXTRA * (parser == HIREDIS)
        latency, cpu = CYCLE[bed]
        yield Budget(row, "latency", "most", latency + extra)
        yield Budget(row, "cpu", "most", cpu + extra, aim=1.0)
        if bed == "idle":
            yield Budget(row, "round_trips", "most", 2, among_peers=False)
            yield Budget(row, "commands", "most", 2, among_peers=False)


BUDGETS: tuple[Budget, ...] = (
    *_cycle(),
    *(
        budget
        for row in ("handover", "handover.slept")
        for budget in (
            Budget(row, "latency", "most", 1.5, aim=1.2),
            Budget(row, "latency", "most", 2.0, statistic="p90"),
            Budget(row, "at_server", "most", 16, among_peers=False),
        )
    ),
    # A waiter that polls every 0.1 s sends 10 commands a second.
    Budget("handover", "commands_waiting", "most", 1.0, among_peers=False),
    Budget("throughput.8", "throughput", "least", 0.80, aim=0.9),
    Budget("throughput.8", "share", "least", 0.9),
    Budget("throughput.8", "round_trips", "most", 3),
    Budget("pause.8", "throughput", "least", 0.95, aim=0.98),
    Budget("pause.8", "worst_wait", "most", 1.5),
    Budget("renewal.10000", "cpu", "most", 4.0, aim=2.0),
    Budget("renewal.10000", "round_trips", "most", 20, statistic="max"),
    Budget("renewal.10000", "threads", "most", 1, statistic="max"),
    Budget("renewal.10000", "connections", "most", 2, statistic="max"),
    Budget("renewal.10000", "memory", "most", 20),
    Budget("renewal.10000", "lost", "most", 0, statistic="max"),
    Budget("task", "total", "most", 1.25, aim=1.15),
    Budget("task", "publish_commands", "most", 0, statistic="max", among_peers=False),
    Budget("check", "check", "most", 1e-6),
    Budget("check", "held", "most", 1e-6),
    Budget("check", "remaining", "most", 1e-6),
    Budget("scale", "first_page", "most", 20.0, subject=MANY),
    Budget("scale", "search", "most", 1.0, statistic="max", subject=MANY, compared=False),
    Budget("scale", "other_order", "most", 1.0, statistic="max", subject=MANY, compared=False),
    *(
        budget
        for names in NAMES
        for budget in (
            Budget(f"db.cycle.{names}", "latency", "most", 1.35),
            Budget(f"db.cycle.{names}", "round_trips", "most", 2, among_peers=False),
        )
    ),
    Budget("db.handover", "latency", "most", 1.5),
    Budget("db.handover.slept", "latency", "most", 1.5),
    Budget("db.renewal.10000", "round_trips", "most", 20, statistic="max"),
    Budget("db.renewal.10000", "threads", "most", 1, statistic="max"),
    Budget("db.renewal.10000", "connections", "most", 2, statistic="max"),
    Budget("db.renewal.10000", "lost", "most", 0, statistic="max"),
    Budget("db.idle", "statements", "most", 0),
    *(
        Budget(f"stores.{store}.cycle.same", "latency", "most", 1.5)
        for store in ("redlock", "zookeeper", "etcd", "failover")
    ),
    Budget("stores.zookeeper.cycle.same", "round_trips", "most", 2, among_peers=False),
    Budget("stores.etcd.cycle.same", "commands", "most", 4, among_peers=False),
    Budget("stores.failover.cycle.same", "round_trips", "most", 2, among_peers=False),
    *(
        Budget(f"stores.{store}.renewal", "lost", "most", 0, statistic="max")
        for store in ("redlock", "zookeeper", "etcd")
    ),
    Budget("import", "import", "most", 0.15, aim=0.05),
)


def judge(rows: Iterable[RowResult], budgets: Iterable[Budget] = BUDGETS) -> tuple[Verdict, ...]:
    """The verdicts on the budgets of the measured rows."""
    measured = {row.name: row for row in rows}
    return tuple(
        _verdict(budget, measured[budget.row]) for budget in budgets if budget.row in measured
    )


def _verdict(budget: Budget, row: RowResult) -> Verdict:
    value = _value(budget, row, budget.subject)
    if value is None:
        return Verdict(budget, None, False, 0.0, None, ())
    sign = 1 if budget.at == "most" else -1
    ahead = sign * (budget.limit - value) / budget.limit if budget.limit else -sign * value
    peers = []
    if budget.among_peers:
        for name, subject in row.subjects.items():
            its = _value(budget, row, name) if subject.role == "peer" else None
            if its is not None and budget.better(its, value):
                peers.append((name, its))
    peers.sort(key=lambda peer: sign * peer[1])
    aimed = None if budget.aim is None else not budget.better(budget.aim, value)
    return Verdict(budget, value, budget.holds(value), ahead, aimed, tuple(peers))


def _value(budget: Budget, row: RowResult, subject: str) -> float | None:
    if not any(metric.name == budget.metric for metric in row.metrics):
        return None
    read = row.compared if budget.compared else row.series
    series = read(subject, budget.metric)
    if series is None or not series.rounds:
        return None
    try:
        return series.statistic(budget.statistic)
    except KeyError:
        return None
