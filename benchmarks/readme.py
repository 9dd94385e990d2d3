"""Puts measured times into the comparison in README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .model import OURS, Result
from .report import amount

README = Path(__file__).resolve().parent.parent / "README.md"
TABLE = re.compile(r"(?<=<!-- compared -->\n).*(?=<!-- end of the comparison -->)", re.DOTALL)


class Time(NamedTuple):
    """One time in a cell: the median of a subject in a row of the benchmark."""

    row: str
    subject: str
    metric: str = "latency"
    before: str = ""
    after: str = ""

    def shown(self, result: Result) -> str:
        series = result.rows[self.row].series(self.subject, self.metric)
        if series is None:
            raise KeyError(f"{self.subject} was not measured in {self.row}")
        # A number that stands alone on its line, without its unit, is hard to read.
        time = amount(series.spread.median, "s").replace(" ", "\N{NO-BREAK SPACE}")
        return f"{self.before}{time}{self.after}"


REDIS, POSTGRESQL, TASK = "cycle.idle.same", "db.cycle.same", "task"
TIMES = {
    "django-dlock": [
        Time(REDIS, OURS, after=" Redis"),
        Time(POSTGRESQL, OURS, after=" PostgreSQL"),
        Time(TASK, OURS, "total", after=" task"),
    ],
    "redis-py": [Time(REDIS, "redis-py Lock")],
    "django-redis": [Time(REDIS, "django-redis")],
    "python-redis-lock": [
        Time(REDIS, "python-redis-lock"),
        Time(REDIS, "python-redis-lock, renewing", before="renewing "),
    ],
    "celery-once": [Time(TASK, "celery-once", "total", after=" task")],
    "celery-singleton": [Time(TASK, "celery-singleton", "total", after=" task")],
    "django-pglock": [Time(POSTGRESQL, "django-pglock")],
    "`select_for_update`": [Time(POSTGRESQL, "select_for_update")],
}
"""The first word of a line → what its last cell shows."""

AHEAD = {
    "PostgreSQL's advisory locks are several times as fast": [
        ("db.cycle.same", "latency", "django-pglock", 2.0),
        ("db.cycle.fresh", "latency", "django-pglock", 2.0),
        ("db.throughput.8", "throughput", "django-pglock", 2.0),
    ],
    "redis-py's `Lock` uses less processor time, and is faster on a busy machine": [
        ("cycle.idle.same", "cpu", "redis-py Lock", 1.0),
        ("cycle.busy.same", "latency", "redis-py Lock", 1.0),
        ("cycle.busy.fresh", "latency", "redis-py Lock", 1.0),
    ],
}
"""What README says of others → row, metric, subject, and how many times better it is at least."""


def with_times(text: str, result: Result) -> str:
    """README with the times of this result in the last column."""

    def line(found: re.Match[str]) -> str:
        subject = found[2].split()[0]
        times = ", ".join(time.shown(result) for time in TIMES[subject])
        return f"{found[1]}{times} |"

    def table(found: re.Match[str]) -> str:
        head, rule, lines = found[0].lstrip("\n").split("\n", 2)
        lines = re.sub(r"^(\| (.+?) \|.*\| )[^|]+ \|$", line, lines, flags=re.MULTILINE)
        return f"\n{head}\n{rule}\n{lines}"

    return TABLE.sub(table, text)
