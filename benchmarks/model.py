"""What a row of the benchmark is, and its results.

A row compares subjects: django-dlock, floors (which no library can beat with this client and
server) and peers. They are measured in interleaved rounds of one run, so that disturbances of the
machine affect all of them alike. The result is the ratio to the row's floor within each round, and
the spread of that ratio over the rounds.

To add a row: a module in ``benchmarks/rows`` with a function ``rows(bench) -> Iterable[Row]``,
named in ``benchmarks/rows/__init__.py``; its limits go into ``benchmarks/budgets.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from .statistics import Spread, median, percentile

OURS = "django-dlock"
"""The subject that the budgets are for."""

Role = Literal["ours", "floor", "peer"]

Readings = Mapping[str, "float | Sequence[float]"]
"""Of one round, by the metric's name: its number, or raw samples whose median is its number."""


class Unavailable(Exception):
    """A subject cannot take part; the message says why, and the table says "cannot: why"."""


# -- rows -----------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """One thing that a round measures of a subject.

    Attributes:
        unit: ``"s"``, ``"/s"``, ``"MiB"``, or empty for a count.
        better: Whether more or less is better.
        floor: Name of the subject it is divided by, round by round; ``None`` if the number itself
            counts.
        percentiles: Of the raw samples of all rounds together, besides the median of rounds.
    """

    name: str
    unit: str = ""
    better: Literal["lower", "higher"] = "lower"
    floor: str | None = None
    percentiles: tuple[int, ...] = ()


class Session:
    """A subject that is ready to be measured: connected, warm, its processes started.

    ``round`` is called once per round. ``once`` is called once before the first round, for values
    that do not vary or whose measurement would disturb the timing (counts of commands and round
    trips, memory). The runner collects garbage before each call. Background threads should be idle
    between the calls, because their work would slow down other subjects.
    """

    def once(self) -> Readings:
        return {}

    def round(self) -> Readings:
        return {}


@dataclass(frozen=True)
class Subject:
    """One of the compared ways.

    Attributes:
        options: How it is configured, and why; shown to readers, who can judge the fairness.
        open: Prepares it and cleans up after it. Raises ``Unavailable`` if it cannot take part.
    """

    name: str
    role: Role
    options: str
    open: Callable[[], AbstractContextManager[Session]]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: As on the command line: ``"cycle.same"``; ``--rows cycle`` chooses all ``cycle.…``.
        metrics: The table is sorted by the first one.
        rounds: In a full run; a quick one has at most three.
        passes: How often each subject has a turn within a round. If the machine changes its speed
            within a second, many short turns compare better than one long one; only for raw
            samples, which are combined.
        seconds: Roughly the duration in a full run. A machine that needs longer leaves out passes
            or rounds.
        family, x: For a row that is one point of a curve: the curve's name and the position on its
            axis.
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


# -- results --------------------------------------------------------------------------


@dataclass
class Series:
    """One metric of one subject over the rounds.

    Attributes:
        rounds: Its number in each round; one entry if it was read only ``once``.
        percentiles: By rank as text (JSON allows no other keys), of all raw samples together.
    """

    rounds: list[float] = field(default_factory=list)
    percentiles: dict[str, float] = field(default_factory=dict)

    @property
    def spread(self) -> Spread:
        return Spread.of(self.rounds)

    def over(self, floor: Series) -> Series:
        """The ratio to a floor, round by round; percentiles by those of the floor.

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
        """Add the readings of one round. Raises ``KeyError`` for a metric that the row lacks."""
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
        environment: Versions, CPU count and other conditions that affect the numbers.
    """

    started: str
    quick: bool
    environment: dict[str, Any]
    rows: dict[str, RowResult] = field(default_factory=dict)
