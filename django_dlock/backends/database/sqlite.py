"""Where a project on SQLite keeps its leases: in a separate file beside the project's.

SQLite lets only one connection write at a time. In the project's own file, a long transaction of
the project would block renewals.

The file is created at first use. If the project's database is in memory, as in most test runs, the
leases are in memory, too, in one database for all threads of the process.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from ... import clock
from .connection import Connection, Failure, failure
from .dialects import LEASES, PROCESSES
from .pool import Urgency

__all__ = ["MemoryPool", "connect", "is_in_memory", "path_beside", "sole_writer"]

T = TypeVar("T")

SUFFIX = "-dlock"
FORMAT = 1
"""The version of the schema; rises with every change of it."""
OLDEST = (3, 35, 0)
"""The first version of SQLite that has ``RETURNING``."""
BUSY = 0.05
"""Seconds for which a statement is repeated while another connection writes."""

PROBE_PAUSE = (0.0005, 0.002)
"""Shortest and longest pause before a statement is tried again, in seconds."""

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


def path_beside(name: object) -> Path:
    """The file of the leases, beside the project's."""
    text = str(name)
    if text.startswith("file:"):
        text = unquote(urlsplit(text).path)
    # Resolve links, so that all paths to the project's file give the same file of leases.
    path = Path(text).resolve()
    return path.with_name(path.name + SUFFIX)


def connect(path: Path) -> Callable[[], Connection]:
    """Return a function that opens the file, and creates it if there is none."""

    def open_() -> Connection:
        raw = _open(str(path), uri=False)
        try:
            raw.execute("PRAGMA synchronous = NORMAL")
            _create(raw, durable=True)
            raw.execute("PRAGMA busy_timeout = 0")
        except sqlite3.Error as error:
            raw.close()
            raise failure(error) from error
        return FileConnection(raw, sqlite3, mark="?")

    return open_


class FileConnection(Connection):
    """A connection to the file of leases."""

    def _execute(self, statement: str, parameters: Sequence[Any]) -> None:
        give_up_at = clock.now() + BUSY
        while True:
            try:
                return super()._execute(statement, parameters)
            except Failure as error:
                if error.kind != "passing" or clock.now() >= give_up_at:
                    raise
            # SQLite itself would pause for longer and longer, and a connection that writes often
            # would leave it no chance.
            time.sleep(random.uniform(*PROBE_PAUSE))


def _open(database: str, *, uri: bool) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < OLDEST:
        error = RuntimeError(
            f"Locks need SQLite {'.'.join(map(str, OLDEST))} or newer; this Python has "
            f"{sqlite3.sqlite_version}"
        )
        raise Failure("refused", error)
    raw = sqlite3.connect(
        database, timeout=BUSY, isolation_level=None, check_same_thread=False, uri=uri
    )
    # The file is on this machine, so all processes share its clock.
    raw.create_function("dlock_now", 0, lambda: time.time_ns() // 1000)
    return raw


def _create(raw: sqlite3.Connection, *, durable: bool) -> None:
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
        self._lock = threading.RLock()
        self._connection: Connection | None = None

    def close(self) -> None:
        """Do nothing: closing would delete the leases."""

    def call(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T:
        if not self._lock.acquire(timeout=max(0.0, deadline - clock.now())):
            raise Failure("broken", TimeoutError("another thread took too long"))
        try:
            if self._connection is None:
                raw = _open(":memory:", uri=False)
                _create(raw, durable=False)
                self._connection = Connection(raw, sqlite3, mark="?")
            return use(self._connection)
        finally:
            self._lock.release()
