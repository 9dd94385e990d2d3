"""The floors and peers for leases in a database; see ``peers``.

The floors use PostgreSQL through psycopg and SQLite through sqlite3. Each has its own table with
only a name, an owner, a token and an end.
"""

from __future__ import annotations

import functools
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .model import Unavailable
from .peers import LEASE, Handle, Kind, Route, no_handle, no_postgres

BARE_SQL, PREPARED, BARE_SQLITE = "bare SQL", "bare SQL, prepared", "bare SQLite"
NOTIFY, ADVISORY, ROW = "pg_notify", "pg_advisory_lock", "select_for_update"

CREATE = """
CREATE TABLE IF NOT EXISTS bare_lease (
  name {text} PRIMARY KEY, owner {text} NOT NULL, token bigint NOT NULL, ends_at bigint NOT NULL
)"""
TAKE = """
INSERT INTO bare_lease AS l (name, owner, token, ends_at) VALUES ({mark}, {mark}, 1, {now} + {ttl})
ON CONFLICT (name) DO UPDATE SET
  owner = excluded.owner, token = l.token + 1, ends_at = excluded.ends_at
WHERE l.ends_at <= {now} RETURNING token"""
GIVE = "UPDATE bare_lease SET ends_at = 0 WHERE name = {mark} AND owner = {mark}"


# -- floors ---------------------------------------------------------------------------------


def connect(route: Route, **options: Any) -> Any:
    """A connection of psycopg in autocommit mode.

    Raises:
        Unavailable: There is no PostgreSQL.
    """
    from django.conf import settings

    entry = settings.DATABASES.get(route.database)
    if entry is None:
        raise Unavailable(no_postgres())
    import psycopg

    return psycopg.connect(
        host=entry["HOST"],
        port=entry["PORT"],
        user=entry["USER"],
        dbname=entry["NAME"],
        autocommit=True,
        **options,
    )


def _cycle(execute: Callable[..., Any], **words: Any) -> Callable[[str], None]:
    words["ttl"] = LEASE * 1_000_000
    create, take, give = (text.format(**words) for text in (CREATE, TAKE, GIVE))
    execute(create)
    # Made once, because no lock could be cheaper with this client.
    owner = secrets.token_hex(16)

    def cycle(name: str) -> None:
        execute(take, (name, owner)).fetchone()
        execute(give, (name, owner))

    return cycle


def _bare(threshold: int | None) -> Callable[[Route], Callable[[str], None]]:
    def make(route: Route) -> Callable[[str], None]:
        cursor = connect(route, prepare_threshold=threshold).cursor()
        now = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"
        return _cycle(cursor.execute, text="text", mark="%s", now=now)

    return make


def _bare_sqlite(route: Route) -> Callable[[str], None]:
    from django.conf import settings

    path = Path(settings.DATABASES["default"]["NAME"]).with_name("bare.sqlite3")
    connection = sqlite3.connect(path, isolation_level=None, timeout=20)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    now = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"
    return _cycle(connection.cursor().execute, text="text", mark="?", now=now)


class _Session:
    """An advisory lock of a session."""

    def __init__(self, execute: Callable[..., Any], name: str) -> None:
        self._execute, self._name = execute, name

    def acquire(self) -> None:
        self._execute("SELECT pg_advisory_lock(hashtext(%s))", (self._name,))

    def release(self) -> None:
        self._execute("SELECT pg_advisory_unlock(hashtext(%s))", (self._name,))


def _advisory(route: Route) -> Callable[[str], Handle]:
    execute = connect(route).cursor().execute
    return lambda name: _Session(execute, name)


_heard: dict[str, int] = {}
"""The number of the last notification of a name that this process has received or sent."""


class _Notified:
    """For two processes that alternate: each waits for the other's notification."""

    def __init__(self, connection: Any, name: str) -> None:
        self._connection, self._name = connection, name

    def acquire(self) -> None:
        if self._name not in _heard:
            # At first the name is free, and no notification has been sent.
            first = "SELECT pg_try_advisory_lock(hashtext(%s))"
            if self._connection.execute(first, (self._name,)).fetchone()[0]:
                return
        for notification in self._connection.notifies():
            number = int(notification.payload)
            # A process also receives its own notifications, and those of its other connections.
            if notification.channel == self._name and number > _heard.get(self._name, 0):
                _heard[self._name] = number
                return

    def release(self) -> None:
        _heard[self._name] = number = _heard.get(self._name, 0) + 1
        self._connection.execute("SELECT pg_notify(%s, %s)", (self._name, str(number)))


def _notified(route: Route) -> Callable[[str], Handle]:
    connection = connect(route)

    @functools.cache
    def listen(name: str) -> None:
        connection.execute(f'LISTEN "{name}"')

    def make(name: str) -> Handle:
        listen(name)
        return _Notified(connection, name)

    return make


# -- peers ----------------------------------------------------------------------------------


class _Row:
    """A row locked until the end of a transaction, as Django's documentation shows it."""

    def __init__(self, database: str, name: str) -> None:
        self._database, self._name = database, name
        self._transaction: AbstractContextManager[Any] | None = None

    def acquire(self) -> None:
        from django.contrib.auth.models import Group
        from django.db import transaction

        self._transaction = transaction.atomic(using=self._database)
        self._transaction.__enter__()
        Group.objects.using(self._database).select_for_update().get(name=self._name)

    def release(self) -> None:
        assert self._transaction is not None
        self._transaction.__exit__(None, None, None)


def _row(route: Route) -> Callable[[str], Handle]:
    # Missing rows are created only once.
    connect(route).close()

    @functools.cache
    def ensure(name: str) -> None:
        from django.contrib.auth.models import Group

        Group.objects.using(route.database).get_or_create(name=name)

    def make(name: str) -> Handle:
        ensure(name)
        return _Row(route.database, name)

    return make


DATABASE_KINDS: tuple[Kind, ...] = (
    Kind(
        BARE_SQL,
        "floor",
        "psycopg: an upsert of a lease that has ended, an update of its owner's; nothing prepared, "
        "as with a pooler; one owner for all",
        no_handle,
        cycle=_bare(None),
    ),
    Kind(
        PREPARED,
        "floor",
        "the same, prepared by psycopg after five times",
        no_handle,
        cycle=_bare(5),
    ),
    Kind(
        BARE_SQLITE,
        "floor",
        "sqlite3: the same two statements; WAL, synchronous=NORMAL",
        no_handle,
        cycle=_bare_sqlite,
    ),
    Kind(
        NOTIFY,
        "floor",
        "psycopg: LISTEN in both, SELECT pg_notify; no lease, nothing is stored",
        _notified,
    ),
    Kind(
        ADVISORY,
        "floor",
        "psycopg: SELECT pg_advisory_lock and pg_advisory_unlock; no lease",
        _advisory,
    ),
    Kind(
        ROW,
        "peer",
        "a transaction around select_for_update().get() of a row that is there; no lease, and the "
        "connection is idle in transaction meanwhile",
        _row,
    ),
)
