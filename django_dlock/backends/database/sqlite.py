"""Where a project on SQLite keeps its leases: in a separate file beside the project's.

SQLite lets only one connection write at a time. In the project's own file, a long transaction of
the project would block renewals.

The file is created at first use. If the project's database is in memory, as in most test runs, the
leases are in memory, too, in one database for all threads of the process.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..slots import Slots
from .connection import Connection, Failure
from .dialects import LEASES, PROCESSES
from .pool import Urgency

__all__ = ["MemoryPool", "create_tables", "is_in_memory", "open_database", "sole_writer"]

T = TypeVar("T")

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


def is_in_memory(name: object) -> bool:
    """Whether ``DATABASES[…]['NAME']`` means a database in memory."""
    text = str(name)
    return not text or text == ":memory:" or "mode=memory" in text or text == "file::memory:"


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


class MemoryPool:
    """One connection to a database in memory, for all threads; used like ``Pool``."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the leases in a forked child: they belong to the parent process."""
        # A slot is returned even if an interrupt drops it.
        self._slots = Slots(1)
        self._connection: Connection | None = None

    def close(self) -> None:
        """Do nothing: closing would delete the leases."""

    def call(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T:
        slot = self._slots.take(0, deadline)
        if slot is None:
            raise Failure("broken", TimeoutError("another thread took too long"))
        try:
            return use(self._connected())
        finally:
            slot.release()

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None:
            connection = Connection(open_database("file::memory:"), sqlite3, mark="?")
            create_tables(connection.raw, durable=False)
            self._connection = connection
        elif connection.raw.in_transaction:
            # An interrupt may have left it open.
            connection.raw.rollback()
        return connection
