"""What SQLite does differently from the other databases: statements, tables, connections."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .connection import Connection, Failure
from .statements import LEASES, PROCESSES, Dialect, Executor

FORMAT = 1
"""The version of the schema; rises with every change of it."""
OLDEST = (3, 35, 0)
"""The first version of SQLite that has ``RETURNING``."""

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS {LEASES} (
  id TEXT NOT NULL PRIMARY KEY, key_prefix TEXT NOT NULL, name TEXT NOT NULL,
  version INTEGER NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, ended TEXT NOT NULL,
  token INTEGER NOT NULL, ttl INTEGER NOT NULL, granted_at INTEGER NOT NULL,
  ends_at INTEGER NOT NULL, renewals INTEGER NOT NULL, shortened INTEGER NOT NULL,
  process TEXT NOT NULL, metadata TEXT NOT NULL, past TEXT NOT NULL, queue TEXT NOT NULL,
  cancelled TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS dlock_lease_name ON {LEASES} (key_prefix, name);
CREATE TABLE IF NOT EXISTS {PROCESSES} (
  id TEXT NOT NULL PRIMARY KEY, seen_at INTEGER NOT NULL, gone INTEGER NOT NULL
) WITHOUT ROWID;
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class SQLite(Dialect):
    FACTS = (
        ("server", "SQLite {}", "SELECT sqlite_version()"),
        (
            "persistence",
            "leases are in {}",
            "SELECT coalesce(nullif(file, ''), 'memory') FROM pragma_database_list WHERE seq = 0",
        ),
    )
    NOW = "dlock_now()"
    GREATEST = "max"
    SKIP_LOCKED = ""
    POSITION = "instr"

    @staticmethod
    def key(digest: bytes) -> Any:
        return digest.hex()

    def renew(
        self, executor: Executor, renewals: Sequence[tuple[Any, str, int]], process: str
    ) -> set[tuple[str, str]]:
        if process:
            self.beat(executor, process)
        ends = self.KEPT.format(now="t.now", until="(t.now + r.ttl)")
        marks = ", ".join(["(%s, %s, %s)"] * len(renewals))
        statement = f"""
WITH r (id, owner, ttl) AS (VALUES {marks}), t (now) AS (SELECT {self.NOW})
UPDATE {LEASES} AS l SET ends_at = {ends}, ttl = max(r.ttl, {ends} - t.now),
  renewals = max(l.renewals, 0) + 1, version = l.version + 1
FROM r, t WHERE l.id = r.id AND l.owner = r.owner AND l.ended = '' AND l.kind <> 'cooling'
  AND l.ends_at > t.now
RETURNING id, owner"""
        values = [value for renewal in renewals for value in renewal]
        return {(self.text(key), owner) for key, owner in executor.rows(statement, values)}


def open_database(uri: str, busy: float = 0.0) -> sqlite3.Connection:
    """A connection of the driver.

    Args:
        uri: As SQLite understands it.
        busy: Seconds for which SQLite itself waits for another connection that writes.
    """
    if sqlite3.sqlite_version_info < OLDEST:
        error = RuntimeError(
            f"Locks need SQLite {'.'.join(map(str, OLDEST))} or newer; this Python has "
            f"{sqlite3.sqlite_version}"
        )
        raise Failure("refused", error)
    raw = sqlite3.connect(
        uri, timeout=busy, isolation_level=None, check_same_thread=False, uri=True
    )
    # The file is on this machine, so all processes share its clock.
    raw.create_function("dlock_now", 0, lambda: time.time_ns() // 1000)
    return raw


def create_tables(raw: sqlite3.Connection, *, durable: bool) -> None:
    """Create the tables if there are none."""
    if raw.execute("PRAGMA user_version").fetchone()[0] >= FORMAT:
        return
    if durable:
        # In this mode, readers and the one writer do not wait for each other.
        raw.execute("PRAGMA journal_mode = WAL")
    try:
        raw.executescript(SCHEMA)
    except sqlite3.Error:
        if raw.in_transaction:
            raw.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def sole_writer(connection: Connection) -> Iterator[None]:
    """Keep all other connections from writing during the block, which is one transaction."""
    connection.count("BEGIN IMMEDIATE")
    try:
        yield
        connection.count("COMMIT")
    except BaseException:
        with contextlib.suppress(Failure):
            connection.count("ROLLBACK")
        raise
