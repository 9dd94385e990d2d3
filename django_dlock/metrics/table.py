"""Adds what a process has counted to the table of lock statistics.

Every process adds to the same rows, in one statement, so that the table is as small with a hundred
processes as with one. Each count is added to the row of its minute, of its ten minutes and of its
hour; the finer a row, the sooner it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db import NotSupportedError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..models import LockStatistics
from .counts import Minutes, Point, Series
from .instruments import DURATIONS

VENDORS = ("sqlite", "postgresql", "mysql")
KEYS = ("period", "start", "metric", "alias", "group", "label")
SUMS = ("count", "total", *LockStatistics.BUCKETS)
COLUMNS = ("id", *KEYS, *SUMS, "highest")
NO_BUCKETS = [0] * (len(DURATIONS) + 1)
MOST_ROWS = 500
"""Rows of one statement."""
BUSY_TIMEOUT = 1000
"""Milliseconds to wait for a SQLite file that somebody else is writing to."""


def database() -> str:
    """The alias of the database that has the table."""
    return router.db_for_write(LockStatistics)


def write(minutes: Minutes) -> None:
    """Add the counts to their rows, all of them or none.

    Raises:
        django.db.Error: Nothing was added.
        NotSupportedError: Not on this kind of database.
    """
    # In the order of their keys, so that two processes never wait for each other's rows.
    rows = sorted(_rows(minutes))
    connection = connections[database()]
    if connection.vendor not in VENDORS:
        raise NotSupportedError(f"no lock statistics on {connection.display_name}")
    if connection.vendor == "sqlite":
        # A fork waits for this statement, so the statement must not wait long for other writers.
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT}")
    most = MOST_ROWS
    if connection.features.max_query_params:
        most = min(most, connection.features.max_query_params // len(COLUMNS))
    chunks = [rows[start : start + most] for start in range(0, len(rows), most)]
    if len(chunks) == 1:
        _add(connection, chunks[0])
        return
    with transaction.atomic(using=connection.alias):
        for chunk in chunks:
            _add(connection, chunk)


def _rows(minutes: Minutes) -> Iterator[tuple[Any, ...]]:
    merged: dict[tuple[int, int, tuple[str, ...]], Point] = {}
    for minute, points in minutes.items():
        for series, point in points.items():
            texts = tuple(map(_storable, series, _LENGTHS))
            for period in LockStatistics.Period.values:
                start = minute - minute % period
                merged.setdefault((period, start, texts), Point()).merge(point)
    for (period, start, texts), point in merged.items():
        identity = LockStatistics.id_of(period, start, *texts)
        counted = (point.count, point.total, *(point.buckets or NO_BUCKETS), point.highest)
        yield (identity, period, start, *texts, *counted)


_FIELDS = {field.name: field for field in LockStatistics._meta.concrete_fields}
_LENGTHS = tuple(_FIELDS[name].max_length or 0 for name in Series._fields)


def _storable(text: str, length: int) -> str:
    """The text without characters that a database refuses; it may come from the project's rule."""
    text = text.encode("utf-8", "replace").decode().replace("\0", "?")
    return text[:length]


def _add(connection: BaseDatabaseWrapper, rows: Sequence[tuple[Any, ...]]) -> None:
    values = ", ".join([f"({', '.join(['%s'] * len(COLUMNS))})"] * len(rows))
    with connection.cursor() as cursor:
        cursor.execute(_statement(connection, values), [value for row in rows for value in row])


def _statement(connection: BaseDatabaseWrapper, values: str) -> str:
    quote = connection.ops.quote_name
    table = quote(LockStatistics._meta.db_table)
    columns = {name: quote(_FIELDS[name].attname) for name in COLUMNS}
    if connection.vendor == "mysql":
        on_conflict, old, new, greatest = "ON DUPLICATE KEY UPDATE", "{}", "VALUES({})", "GREATEST"
    else:
        on_conflict = f"ON CONFLICT ({columns['id']}) DO UPDATE SET"
        old, new = f"{table}.{{}}", "EXCLUDED.{}"
        greatest = "MAX" if connection.vendor == "sqlite" else "GREATEST"
    changes = [
        f"{columns[name]} = {old} + {new}".format(columns[name], columns[name]) for name in SUMS
    ]
    highest = columns["highest"]
    changes.append(f"{highest} = {greatest}({old}, {new})".format(highest, highest))
    names = ", ".join(columns.values())
    # Only names of our own table, quoted.
    return " ".join(
        ["INSERT INTO", table, f"({names}) VALUES", values, on_conflict, ", ".join(changes)]
    )
