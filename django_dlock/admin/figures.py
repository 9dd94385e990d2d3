"""Reads the table of lock statistics for one page, in three queries."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from django.db import models, router, transaction
from django.db.models import Max, Sum
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..metrics import instruments
from ..metrics.instruments import DURATIONS, Instrument
from ..models import LockStatistics

Period = LockStatistics.Period
Rows = models.QuerySet[LockStatistics]

LAG = 60
"""Seconds after which all processes have written what they have counted."""
MOST_SERIES = 20_000
OVER_TIME = (
    instruments.HELD,
    instruments.WAITING,
    instruments.LOSSES,
    instruments.LATENESS,
    instruments.REQUEUES,
)


DISTRIBUTIONS = (instruments.WAITS, instruments.HOLDS)
BY_SERIES = (
    instruments.ATTEMPTS,
    instruments.CONTENTIONS,
    instruments.DOUBTS,
    instruments.HOLDS,
    instruments.LOSSES,
    instruments.RENEWALS,
    instruments.REQUEUES,
    instruments.WAITS,
)
"""Which metrics each of the queries reads."""


class Range(NamedTuple):
    """How far back a page goes."""

    key: str
    title: Promise
    period: Period
    seconds: int


RANGES = {
    each.key: each
    for each in (
        Range("hour", _("1 hour"), Period.MINUTE, 3600),
        Range("day", _("24 hours"), Period.TEN_MINUTES, 86_400),
        Range("week", _("7 days"), Period.HOUR, 7 * 86_400),
    )
}


class Distribution:
    """How long durations were: how many of them are in each bucket.

    Attributes:
        buckets: How many up to each of ``DURATIONS``, and how many were longer than all.
    """

    def __init__(self) -> None:
        self.count, self.total, self.highest = 0, 0.0, 0.0
        self.buckets = [0] * (len(DURATIONS) + 1)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of the query that reads the buckets."""
        self.count += int(row["n"])
        self.total += row["seconds"]
        self.highest = max(self.highest, row["most"])
        for number in range(len(self.buckets)):
            self.buckets[number] += int(row[f"sum_{number}"])

    def within(self, share: float) -> float:
        """Seconds that this share of the durations did not exceed, rounded up to a bound."""
        passed = 0
        for bound, count in zip(DURATIONS, self.buckets, strict=False):
            passed += count
            if passed >= share * self.count:
                return min(bound, self.highest)
        return self.highest


class Group(NamedTuple):
    """What happened to the locks of one alias and one group of names.

    Attributes:
        contended: How many acquires found the lock held.
        gave_up: How many ended without the lock.
        waited: Seconds that those who got the lock have waited for it, together.
        longest: The longest of these.
    """

    alias: str
    name: str
    acquired: int = 0
    contended: int = 0
    gave_up: int = 0
    lost: int = 0
    waited: float = 0.0
    longest: float = 0.0

    @property
    def share(self) -> float:
        """Of all acquires, those that found the lock held."""
        return min(1.0, self.contended / max(1, self.acquired + self.gave_up))

    @property
    def mean(self) -> float:
        return self.waited / max(1, self.acquired)


class Figures:
    """All numbers of one page.

    Args:
        alias: Only locks of this alias; empty for all. Metrics without an alias are always
            included.

    Attributes:
        starts: When each period begins.

    Raises:
        django.db.Error: They could not be read.
    """

    def __init__(self, chosen: Range, alias: str = "", now: float | None = None) -> None:
        self.now = time.time() if now is None else now
        self.range, period = chosen, chosen.period
        last = int(self.now) // period * period
        self.starts = list(range(last - chosen.seconds, last + 1, period))
        self.alias = alias
        self._over_time: dict[tuple[str, int], dict[str, Any]] = {}
        self.waits, self.holds = Distribution(), Distribution()
        self.counts: dict[tuple[str, str, str], int] = defaultdict(int)
        self._groups: dict[tuple[str, str], Group] = {}
        database = router.db_for_read(LockStatistics)
        # A savepoint if the request has a transaction, which then stays usable after an error.
        with transaction.atomic(using=database):
            self._read(LockStatistics.objects.using(database))

    def _read(self, rows: Rows) -> None:
        # Without rows in the future, which a process whose clock is ahead has written.
        period = self.range.period
        rows = rows.filter(LockStatistics.ids(period, self.starts[0], self.end))
        if self.alias:
            rows = rows.filter(alias__in=[self.alias, ""])
        # Under other names than the columns, because a sum cannot have the name of its column.
        values = {"n": Sum("count"), "seconds": Sum("total"), "most": Max("highest")}
        by_time: Any = _of(rows, OVER_TIME).values("metric", "start").annotate(**values)
        for row in _finite(by_time):
            self._over_time[row["metric"], row["start"]] = row
        sums = {f"sum_{number}": Sum(name) for number, name in enumerate(LockStatistics.BUCKETS)}
        durations: Any = _of(rows, DISTRIBUTIONS).values("metric").annotate(**values, **sums)
        for row in _finite(durations):
            distribution = self.waits if row["metric"] == instruments.WAITS.name else self.holds
            distribution.add(row)
        series: Any = _of(rows, BY_SERIES).values("metric", "alias", "group", "label")
        for row in _finite(series.annotate(**values).order_by("-n")[:MOST_SERIES]):
            self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        metric, count = row["metric"], int(row["n"])
        self.counts[metric, row["group"], row["label"]] += count
        key = row["alias"], row["group"]
        group = self._groups.get(key) or Group(*key)
        if metric == instruments.WAITS.name:
            group = group._replace(
                acquired=group.acquired + count,
                waited=group.waited + row["seconds"],
                longest=max(group.longest, row["most"]),
            )
        elif metric == instruments.CONTENTIONS.name:
            group = group._replace(contended=group.contended + count)
        elif metric == instruments.ATTEMPTS.name:
            group = group._replace(gave_up=group.gave_up + count)
        elif metric == instruments.LOSSES.name:
            group = group._replace(lost=group.lost + count)
        else:
            return
        self._groups[key] = group

    @property
    def end(self) -> int:
        """When the last period ends, which has begun already."""
        return self.starts[-1] + self.range.period

    @property
    def is_empty(self) -> bool:
        return not self.counts and not self._over_time

    def level(self, instrument: Instrument) -> list[float | None]:
        """How many there were on average in each period; ``None`` until all have written."""
        period = self.range.period
        return [
            self._over_time.get((instrument.name, start), {}).get("seconds", 0.0) / period
            if start + period + LAG <= self.now
            else None
            for start in self.starts
        ]

    def sums(self, instrument: Instrument) -> list[int]:
        """How many there were in each period; the last one has only begun."""
        found = self._over_time
        return [int(found.get((instrument.name, at), {}).get("n", 0)) for at in self.starts]

    def longest(self, instrument: Instrument) -> list[float]:
        """The longest duration in each period."""
        found = self._over_time
        return [found.get((instrument.name, at), {}).get("most", 0.0) for at in self.starts]

    def total(self, instrument: Instrument) -> int:
        return sum(
            count for (metric, _g, _l), count in self.counts.items() if metric == instrument.name
        )

    @property
    def not_acquired_but_requeued(self) -> int:
        """How many acquires without a lock were those of tasks, which were then requeued.

        0 for one alias, because requeues are not told apart by alias.
        """
        if self.alias:
            return 0
        requeued = dict(self.by_label(instruments.REQUEUES))
        # A process may have ended between the two, or not have written one of them.
        return sum(
            min(count, requeued.get(reason, 0))
            for reason, count in self.by_label(instruments.ATTEMPTS)
        )

    def by_label(self, instrument: Instrument) -> list[tuple[str, int]]:
        """The labels of the metric, such as its reasons, the most frequent first."""
        found: dict[str, int] = defaultdict(int)
        for (metric, _group, label), count in self.counts.items():
            if metric == instrument.name:
                found[label] += count
        return _ranked(found.items())

    def by_group_and_label(self, instrument: Instrument) -> list[tuple[tuple[str, str], int]]:
        """As ``by_label``, for each group."""
        return _ranked(
            ((group, label), count)
            for (metric, group, label), count in self.counts.items()
            if metric == instrument.name
        )

    def groups(self) -> list[Group]:
        """Those with the most contention first."""
        return sorted(
            self._groups.values(),
            key=lambda each: (
                -each.contended,
                -each.gave_up,
                -each.acquired,
                each.alias,
                each.name,
            ),
        )


def _ranked(counts: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """The highest count first."""
    found: Sequence[tuple[Any, int]] = [each for each in counts if each[1]]
    return sorted(found, key=lambda each: (-each[1], each[0]))


def _finite(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, without numbers that no picture can show, and that we have not written."""
    for row in rows:
        yield {
            name: 0.0 if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }


def _of(rows: Rows, metrics: Sequence[Instrument]) -> Rows:
    return rows.filter(metric__in=[each.name for each in metrics])
