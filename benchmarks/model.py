"""What a row of the benchmark is, and what is known of it when it has run.

A row compares subjects: django-dlock, floors (what no library can beat with this client
and server) and peers. They are measured in interleaved rounds of one run, so that whatever the
machine does meanwhile hits all of them alike; what counts is the ratio to the row's floor
within each round, and the spread of that ratio over the rounds.

To add a row: a module in ``benchmarks/rows`` with a function ``rows(bench) -> Iterable[Row]``,
named in ``benchmarks/rows/__init__.py``; its limits go into ``benchmarks/budgets.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from .statistics import Spread, median, percentile

__all__ = [
    "OURS",
    "Gathering",
    "Metric",
    "Readings",
    "Result",
    "Role",
    "Row",
    "RowResult",
    "Series",
    "Session",
    "Subject",
    "SubjectResult",
    "Unavailable",
]

OURS = "django-dlock"
"""The subject that budgets are about."""

Role = Literal["ours", "floor", "peer"]

Readings = Mapping[str, "float | Sequence[float]"]
"""Of one round, by the metric's name: its number, or raw samples whose median is its number."""


class Unavailable(Exception):
    """A subject cannot take part; the message says why, and the table says "cannot: why"."""


# -- what is measured -----------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """One thing that a round measures of a subject.

    Attributes:
        unit: ``"s"``, ``"/s"``, ``"MiB"``, or empty for a count.
        better: Which way is good.
        floor: Name of the subject that it is divided by, round by round; ``None`` where the
            number counts as it stands.
        percentiles: Of the raw samples of all rounds together, beside the median of rounds.
    """

    name: str
    unit: str = ""
    better: Literal["lower", "higher"] = "lower"
    floor: str | None = None
    percentiles: tuple[int, ...] = ()


class Session:
    """A subject that is ready to be measured: connected, warm, its processes started.

    ``round`` is called once per round, ``once`` once before the first round, for what does not
    vary or would disturb the clock (counting commands and round trips, memory). The runner
    collects garbage before each call; what happens in background threads between the calls is
    at the expense of other subjects, so there should be nothing.
    """

    def once(self) -> Readings:
        return {}

    def round(self) -> Readings:
        return {}


@dataclass(frozen=True)
class Subject:
    """Who is measured.

    Attributes:
        options: How it is set up, and why so; shown to readers, for they judge the fairness.
        open: Gets it ready and cleans up after it. Raises ``Unavailable`` where it cannot.
    """

    name: str
    role: Role
    options: str
    open: Callable[[], AbstractContextManager[Session]]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: As on the command line: ``"cycle.same"``; ``--rows cycle`` picks all ``cycle.…``.
        metrics: The first one is what the table sorts by.
        rounds: In a full run; a quick one makes do with three at most.
        passes: How often a round goes around all subjects. Where the machine changes its pace
            within a second, many short turns compare better than one long one; only for raw
            samples, which are put together.
        seconds: What a full run of it takes, roughly. A machine that needs longer leaves out
            passes, or else rounds.
        family, x: A row that is one point of a curve: its name and where it stands on the axis.
        bed, parser: Where it is measured, and how redis-py reads; see ``beds``, ``parsers``.
    """

    name: str
    title: str
    metrics: tuple[Metric, ...]
    subjects: tuple[Subject, ...]
    rounds: int = 15
    passes: int = 1
    seconds: float = 10.0
    family: str = ""
    x: float | None = None
    bed: str = "idle"
    parser: str = "python"

    def metric(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)


# -- what came out --------------------------------------------------------------------------


@dataclass
class Series:
    """One metric of one subject over the rounds.

    Attributes:
        rounds: Its number in each round; one entry for what was read only ``once``.
        percentiles: By rank, as text (JSON knows no other keys): of all raw samples together.
    """

    rounds: list[float] = field(default_factory=list)
    percentiles: dict[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> Spread:
        return Spread.of(self.rounds)

    def over(self, floor: Series) -> Series:
        """The ratio to a floor, round by round; percentiles to the floor's percentiles.

        A round without a reading of the floor is left out.
        """
        return Series(
            rounds=[mine / its for mine, its in zip(self.rounds, floor.rounds, strict=True) if its],
            percentiles={
                rank: value / floor.percentiles[rank]
                for rank, value in self.percentiles.items()
                if rank in floor.percentiles
            },
        )

    def statistic(self, name: str) -> float:
        """``"median"``, ``"min"`` or ``"max"`` of the rounds; ``"p99"`` of the raw samples."""
        if name.startswith("p"):
            return self.percentiles[name[1:]]
        return float(getattr(self.spread, name))


@dataclass
class SubjectResult:
    """The results of one subject; ``cannot`` says why there are none."""

    role: Role
    options: str
    series: dict[str, Series] = field(default_factory=dict)
    cannot: str | None = None


@dataclass
class RowResult:
    """The results of one row."""

    name: str
    title: str
    metrics: tuple[Metric, ...]
    family: str = ""
    x: float | None = None
    bed: str = "idle"
    parser: str = "python"
    subjects: dict[str, SubjectResult] = field(default_factory=dict)
    seconds: float = 0.0

    def metric(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)

    def series(self, subject: str, metric: str) -> Series | None:
        """The number as it was read; ``None`` if it was not read."""
        result = self.subjects.get(subject)
        return None if result is None else result.series.get(metric)

    def compared(self, subject: str, metric: str) -> Series | None:
        """The ratio to the metric's floor; ``None`` if there is none, or either was not read."""
        mine, floor = self.series(subject, metric), self.metric(metric).floor
        if mine is None or floor is None:
            return mine
        its = self.series(floor, metric)
        ratio = None if its is None else mine.over(its)
        return ratio if ratio is not None and ratio.rounds else None


class Gathering:
    """Collects the readings of one subject into series."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._rounds: dict[str, list[float]] = {}
        self._samples: dict[str, list[float]] = {}

    def add(self, *passes: Readings) -> None:
        """The readings of one round. Raises ``KeyError`` for a metric that the row lacks."""
        for name, reading in _together(passes).items():
            metric = self._metrics[name]
            if isinstance(reading, (int, float)):
                self._rounds.setdefault(name, []).append(float(reading))
                continue
            self._rounds.setdefault(name, []).append(median(reading))
            if metric.percentiles:
                self._samples.setdefault(name, []).extend(reading)

    def series(self) -> dict[str, Series]:
        return {
            name: Series(
                rounds,
                {
                    str(rank): percentile(self._samples[name], rank)
                    for rank in self._metrics[name].percentiles
                    if name in self._samples
                },
            )
            for name, rounds in self._rounds.items()
        }


def _together(passes: Sequence[Readings]) -> Readings:
    if len(passes) == 1:
        return passes[0]
    samples: dict[str, list[float]] = {}
    for readings in passes:
        for name, reading in readings.items():
            if isinstance(reading, (int, float)):
                raise TypeError(f"{name} of several passes must be samples")
            samples.setdefault(name, []).extend(reading)
    return samples


@dataclass
class Result:
    """One run of the benchmark.

    Attributes:
        environment: Versions, CPU count and what else the numbers depend on.
    """

    started: str
    quick: bool
    environment: dict[str, Any]
    rows: dict[str, RowResult] = field(default_factory=dict)
