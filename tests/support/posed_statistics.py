"""A week of lock statistics as on a busy site, to be shown on their page."""

from __future__ import annotations

import datetime as dt
import math
import random
from types import SimpleNamespace

from django_dlock.admin import figures
from django_dlock.metrics import instruments, table
from django_dlock.metrics.counts import Point, Series

NOW = int(dt.datetime(2026, 11, 24, 16, 42, 30, tzinfo=dt.timezone.utc).timestamp())
GROUPS = {
    # Acquires per minute, the share that finds the lock held, seconds of waiting and of holding.
    "order": (90, 0.08, 0.4, 0.3),
    "checkout": (40, 0.03, 0.1, 0.9),
    "invoice": (25, 0.2, 2.0, 1.5),
    "stock": (18, 0.45, 6.0, 4.0),
    "import": (0.5, 0.1, 40.0, 400.0),
    "report": (0.1, 0.3, 90.0, 1500.0),
}
REASONS = {"expired": 0.012, "broken": 0.004, "max_hold": 0.0015}
TASKS = {"shop.tasks.reprice": 1.3, "shop.tasks.send_invoice": 0.5}
PARTS = ((7 * 86_400, 86_400, 3600), (86_400, 3600, 600), (3600, 0, 60))
"""Periods, in seconds before now: start, end, and the length of a row."""


def pose_statistics(now: int = NOW) -> None:
    """Fill the table."""
    chance = random.Random(7)
    for since, until, step in PARTS:
        for at in range((now - since) // step * step, (now - until) // step * step, step):
            points: dict[Series, Point] = {}
            for group, (rate, *rates) in GROUPS.items():
                if acquired := _times(rate, step, at, chance):
                    _pose_group(points, group, acquired, rates, chance)
            _pose_rest(points, at, step, chance)
            table.write({at: points})


def stop_the_clock(now: int = NOW) -> None:
    """Let the page believe that this is the time."""
    figures.time = SimpleNamespace(time=lambda: float(now))


def _activity(at: int) -> float:
    """Less at night, and a rush some minutes ago."""
    hour = at / 3600 % 24
    rush = 1.5 if 0 < NOW - at < 1500 else 0.0
    return 0.35 + 0.65 * max(0.0, math.sin((hour - 5) / 24 * 2 * math.pi)) + rush


def _times(rate: float, step: int, at: int, chance: random.Random) -> int:
    expected = rate * step / 60 * _activity(at)
    return int(expected * chance.uniform(0.7, 1.3) + chance.random())


def _pose_group(points, group, acquired, rates, chance):
    share, wait, hold = rates
    contended = min(acquired, int(acquired * share * chance.uniform(0.5, 1.5) + chance.random()))

    def series(instrument, label=""):
        return points.setdefault(Series(instrument.name, "default", group, label), Point())

    for number in range(min(acquired, 200)):
        waits = number / min(acquired, 200) < contended / acquired
        series(instruments.WAITS).observe(
            chance.lognormvariate(math.log(wait), 0.8) if waits else chance.uniform(0.0003, 0.002)
        )
        series(instruments.HOLDS, "released").observe(chance.lognormvariate(math.log(hold), 0.9))
    # Durations are drawn for 200 acquires at most, and scaled to all of them.
    for instrument, label in ((instruments.WAITS, ""), (instruments.HOLDS, "released")):
        point, factor = series(instrument, label), acquired / min(acquired, 200)
        point.count = acquired
        point.total *= factor
        point.buckets = [round(count * factor) for count in point.buckets or ()]
    series(instruments.CONTENTIONS).count = contended
    series(instruments.ATTEMPTS, "contended").count = contended // 9
    series(instruments.HELD).total = acquired * hold * chance.uniform(0.8, 1.3)
    series(instruments.WAITING).total = contended * wait * chance.uniform(0.8, 1.5)


def _pose_rest(points, at, step, chance):
    for reason, rate in REASONS.items():
        if lost := _times(rate, step, at, chance) if chance.random() < 0.5 else 0:
            points.setdefault(
                Series(instruments.LOSSES.name, "default", "import", reason), Point()
            ).count = lost
    for task, rate in TASKS.items():
        if count := _times(rate, step, at, chance):
            point = points.setdefault(
                Series(instruments.REQUEUES.name, "", task, "contended"), Point()
            )
            point.count = count
    renewals = _times(40, step, at, chance)
    points.setdefault(
        Series(instruments.RENEWALS.name, "default", "", ""), Point()
    ).count = renewals
    late = points.setdefault(Series(instruments.LATENESS.name, "", "", ""), Point())
    for _ in range(min(renewals, 20)):
        late.observe(chance.lognormvariate(math.log(0.004), 1.2))
