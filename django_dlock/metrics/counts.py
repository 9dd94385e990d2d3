"""Adds up in memory what a process counts, minute by minute."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from .. import clock
from .instruments import DURATIONS, Instrument

MINUTE = 60
KEPT = 600
"""Seconds for which counts that cannot be written are kept. Also the longest time that is counted
at once for what was held, after the process was suspended."""


class Series(NamedTuple):
    """What is counted together.

    Attributes:
        group: The group of the lock's name; or the task, where the metric is about tasks.
        label: The outcome, the reason, or how a hold ended; empty if there is none.
    """

    metric: str
    alias: str
    group: str
    label: str


class Point:
    """The values of one series in one period.

    Attributes:
        total: The sum of durations in seconds; or, of what is held or waits, the number
            multiplied by the seconds for which it lasted.
        buckets: How many durations were up to each of ``DURATIONS``, or longer than all.
    """

    __slots__ = ("buckets", "count", "highest", "total")

    def __init__(self) -> None:
        self.count, self.total, self.highest = 0, 0.0, 0.0
        self.buckets: list[int] | None = None

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.count += 1
        self.total += seconds
        self.highest = max(self.highest, seconds)
        if self.buckets is None:
            self.buckets = [0] * (len(DURATIONS) + 1)
        self.buckets[bisect_left(DURATIONS, seconds)] += 1

    def merge(self, other: Point) -> None:
        """Add what another point has counted."""
        self.count += other.count
        self.total += other.total
        self.highest = max(self.highest, other.highest)
        if other.buckets is not None:
            mine = self.buckets or [0] * len(other.buckets)
            self.buckets = [a + b for a, b in zip(mine, other.buckets, strict=True)]


Minutes = dict[int, dict[Series, Point]]
"""Start of a minute, in seconds since 1970 → what was counted in it."""


class Counts:
    """What was counted since ``take``. Not safe for threads by itself."""

    def __init__(self) -> None:
        self._minutes: Minutes = {}
        # What is held or waits now, and since when that has been counted.
        self._levels: dict[Series, tuple[int, float]] = {}
        self._set_clock()

    def _set_clock(self) -> None:
        # Durations are measured on the clock that never steps; the wall clock only names minutes.
        self._offset = time.time() - clock.now()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to write, and will be nothing until something happens."""
        return not self._minutes and not self._levels

    def add(self, instrument: Instrument, value: float, labels: Mapping[str, str]) -> None:
        """Count one value; see ``Exporter.add``."""
        series = _series(instrument, labels)
        now = clock.now()
        if instrument.kind == "up_down":
            self._change_level(series, int(value), now)
        elif instrument.kind == "counter":
            self._point(now, series).count += int(value)
        else:
            self._point(now, series).observe(value)

    def take(self) -> Minutes:
        """Everything that was counted; empties the counts."""
        now = clock.now()
        for series, (level, since) in list(self._levels.items()):
            self._spread(series, level, since, now)
            self._levels[series] = level, now
        taken, self._minutes = self._minutes, {}
        self._set_clock()
        return taken

    def put_back(self, minutes: Minutes) -> None:
        """Count again what could not be written, except what is older than ``KEPT`` seconds."""
        oldest = clock.now() + self._offset - KEPT
        for minute, points in minutes.items():
            if minute >= oldest:
                into = self._minutes.setdefault(minute, {})
                for series, point in points.items():
                    into.setdefault(series, Point()).merge(point)

    def _point(self, at: float, series: Series) -> Point:
        """The point for the minute of ``at``, a time on ``clock.now()``."""
        minute = int(at + self._offset) // MINUTE * MINUTE
        points = self._minutes.get(minute)
        if points is None:
            points = self._minutes[minute] = {}
            if len(self._minutes) > KEPT // MINUTE:
                # Nobody takes the counts, because the last statement hangs.
                del self._minutes[min(self._minutes)]
        point = points.get(series)
        if point is None:
            point = points[series] = Point()
        return point

    def _change_level(self, series: Series, by: int, now: float) -> None:
        level, since = self._levels.pop(series, (0, now))
        self._spread(series, level, since, now)
        # Not below zero: counting may have begun while something was held.
        level = max(0, level + by)
        if level:
            self._levels[series] = level, now

    def _spread(self, series: Series, level: int, since: float, until: float) -> None:
        """Count ``level`` for each second of this time, in the minutes it belongs to."""
        start = max(since, until - KEPT)
        while start < until:
            wall = start + self._offset
            end = min(until, start + MINUTE - wall % MINUTE)
            self._point(start, series).total += level * (end - start)
            start = end


def _series(instrument: Instrument, labels: Mapping[str, str]) -> Series:
    label = ""
    for name in ("outcome", "end", "reason"):
        if name in labels:
            label = labels[name]
    group = labels.get("group") or labels.get("task", "")
    return Series(instrument.name, labels.get("alias", ""), group, label)
