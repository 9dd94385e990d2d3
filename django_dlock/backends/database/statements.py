"""The SQL statements; ``postgresql``, ``mysql`` and ``sqlite`` have those that differ.

Most operations are one statement on a row without waiters, on PostgreSQL also with waiters. Any
other row is read, changed as in ``rows.py``, and written only if nobody has changed it since;
``write`` and ``insert`` return whether they wrote it.

**Tokens.** A new token is higher than the last one of its name, and not below the clock. For a
name whose row was deleted, the clock alone would not do, because it may have stepped back since. So
before rows are deleted, the highest of their tokens is stored in a row of its own. The token of
every new row is higher than that.

Every statement may run again after a lost reply. So each one recognizes its own earlier effect.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from .memory import LONG, is_awaited
from .prepared import Prepared
from .rows import COLUMNS, MEMORY, Message, Row

LEASES, PROCESSES = "django_dlock_leaserecord", "django_dlock_processrecord"
"""Tables of ``models.LeaseRecord`` and ``models.ProcessRecord``."""

HIGHEST = hashlib.blake2b(b"highest token of deleted rows", digest_size=16).digest()
"""The key of the row for tokens is made from this; its name is empty, and it is never held."""
FOR_EVER = 2**62
"""A time after all others, so that this row itself is never deleted."""

SWEPT_AT_ONCE = 50
"""Rows that one step of the sweep examines."""

Found: TypeAlias = tuple[int, Row, bool]
"""The database's time, a row, and whether it is new: not in the table yet."""


class Released(NamedTuple):
    """Whose the name is after a release: a waiter's owner and process, or empty if it is free."""

    owner: str = ""
    process: str = ""


class Executor(Protocol):
    """What a dialect needs from a connection."""

    last_id: int

    @property
    def server(self) -> str: ...

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    def count(self, statement: str, parameters: Sequence[Any] = ()) -> int: ...

    def prepared(self, statement: Prepared, values: Sequence[Any]) -> list[tuple[Any, ...]]: ...


class Dialect:
    """The statements for SQLite, most of them also for PostgreSQL and MySQL."""

    NOW: ClassVar[str]
    """Microseconds since the epoch on the database's clock."""
    GREATEST: ClassVar[str] = "greatest"
    POSITION: ClassVar[str] = "strpos"
    EXACT: ClassVar[str] = "{}"
    """Makes comparisons of a text column exact, byte by byte."""
    SKIP_LOCKED: ClassVar[str] = "FOR UPDATE SKIP LOCKED"
    """Leaves rows out that other transactions have locked."""

    def __init__(self) -> None:
        columns = ", ".join(COLUMNS)
        self._read = (
            f"SELECT {self.NOW}, h.token, {', '.join('l.' + it for it in COLUMNS)} "
            f"FROM (SELECT 1 AS one) o LEFT JOIN {LEASES} l ON l.id = %s "
            f"LEFT JOIN {LEASES} h ON h.id = %s"
        )
        self._insert = (
            f"INSERT INTO {LEASES} (id, key_prefix, name, {columns}) "
            f"VALUES ({', '.join(['%s'] * (3 + len(COLUMNS)))}) ON CONFLICT DO NOTHING"
        )
        self._store_highest = self._insert.replace(
            "DO NOTHING",
            f"(id) DO UPDATE SET token = {self.GREATEST}({LEASES}.token, excluded.token)",
        )
        self._acquire = f"""
INSERT INTO {LEASES} AS l (id, key_prefix, name, {columns})
VALUES (%s, %s, %s, {self.NOW}, %s, %s, '',
  {self.GREATEST}({self.NOW}, coalesce((SELECT token + 1 FROM {LEASES} WHERE id = %s), 0)), %s,
  {self.NOW}, {self.NOW} + %s, 0, 0, %s, %s, '', '', '')
ON CONFLICT (id) DO UPDATE SET
  past = {self.ENDING} || l.owner || '\n' || l.past,
  version = l.version + 1, owner = excluded.owner, kind = excluded.kind, ended = '',
  token = {self.GREATEST}(l.token + 1, excluded.token), ttl = excluded.ttl,
  granted_at = excluded.granted_at, ends_at = excluded.ends_at, renewals = 0, shortened = 0,
  process = excluded.process, metadata = excluded.metadata
WHERE (l.ended <> '' OR l.ends_at <= excluded.granted_at) AND l.queue = ''
  AND length(l.past) < {LONG}
  AND {self.POSITION}(l.owner || l.past || l.cancelled, excluded.owner) = 0
RETURNING token"""
        self._release = (
            f"UPDATE {LEASES} SET ended = 'r', version = version + 1 WHERE id = %s AND owner = %s "
            f"AND ended = '' AND kind <> 'cooling' AND ends_at > {self.NOW} AND queue = ''"
        )
        self._beat = (
            f"INSERT INTO {PROCESSES} (id, seen_at, gone) SELECT %s, t.now, %s "
            f"FROM (SELECT {self.NOW} AS now) t WHERE true "
            "ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at, gone = excluded.gone"
        )

    ENDING: ClassVar[str] = (
        "CASE WHEN l.kind = 'cooling' THEN 'r' WHEN l.ended <> '' THEN l.ended ELSE 'e' END"
    )
    """Code of how the last lease of a free row ended; see ``Row.outcome``."""
    KEPT: ClassVar[str] = (
        "CASE WHEN l.ends_at > {until} AND l.ends_at - {now} <= l.ttl THEN l.ends_at "
        "ELSE {until} END"
    )
    """The end after a renewal; a shorter renewal does not shorten the lease. See ``Row.renew``."""

    @staticmethod
    def key(digest: bytes) -> Any:
        """The primary key of a row, in the form the driver takes."""
        # A UUID of version 5: MariaDB refuses one without a valid version.
        return uuid.UUID(bytes=digest, version=5)

    # -- one row -----------------------------------------------------------------------

    def acquire(
        self,
        executor: Executor,
        key: Any,
        names: tuple[str, str],
        asked: Sequence[Any],
        channel: str | None,
    ) -> int | Found:
        """Grant a free name that nobody waits for; return the token, or 0.

        For any other row the result is 0; ``Row.acquire`` in ``rows.py`` then decides. One
        of these is a row whose memory of ends has to be cut, as after about every 13th grant.

        Args:
            names: Key prefix and name.
            asked: Owner, kind, TTL, process and metadata of the request.
            channel: Of a caller that will wait. If another lease lives, the result may be the row
                in which its ticket is stored already.
        """
        owner, kind, ttl, process, metadata = asked
        values = (key, *names, owner, kind, self.key(HIGHEST), ttl, ttl, process, metadata)
        rows = executor.rows(self._acquire, values)
        return int(rows[0][0]) if rows else 0

    def release(self, executor: Executor, key: Any, owner: str, mac_key: str) -> Released | None:
        """Free the name; ``None`` if only ``Row.release`` can decide.

        Args:
            mac_key: For the message to a waiter; see ``handover_mac``.

        A dialect may hand the lease over to the first waiter. One that does not frees only a name
        that nobody waits for.
        """
        return Released() if executor.count(self._release, (key, owner)) else None

    def read(self, executor: Executor, key: Any) -> tuple[int, Row | None]:
        """The time, and the row if it exists."""
        now, row, is_new = self.read_or_new(executor, key)
        return now, None if is_new else row

    def read_or_new(self, executor: Executor, key: Any) -> Found:
        """The time, the row or a new one, and whether it is new."""
        now, highest, *values = executor.rows(self._read, (key, self.key(HIGHEST)))[0]
        if values[0] is not None:
            return int(now), Row(*values), False
        # Higher than any token and version that a deleted row of this name can have had.
        highest = int(highest or 0)
        return int(now), Row(version=max(int(now), highest), token=highest), True

    def insert(
        self,
        executor: Executor,
        key: Any,
        names: tuple[str, str],
        row: Row,
        messages: Iterable[Message],
    ) -> bool:
        return executor.count(self._insert, (key, *names, *row.values())) > 0

    def write(
        self,
        executor: Executor,
        key: Any,
        before: Sequence[Any],
        row: Row,
        messages: Sequence[Message],
    ) -> bool:
        """Write the changed columns, unless somebody has changed the row since it was read."""
        row.version = before[0] + 1
        changed = [
            (column, new)
            for column, new, old in zip(COLUMNS, row.values(), before, strict=True)
            if new != old
        ]
        assignments = ", ".join(f"{column} = %s" for column, _ in changed)
        statement = f"UPDATE {LEASES} SET {assignments} WHERE id = %s AND version = %s"
        values = [*(new for _, new in changed), key, before[0]]
        return self._written(executor, statement, values, messages)

    def _written(
        self, executor: Executor, statement: str, values: list[Any], messages: Sequence[Message]
    ) -> bool:
        return executor.count(statement, values) > 0

    def read_many(self, executor: Executor, keys: Sequence[Any]) -> tuple[int, dict[str, Row]]:
        """The time, and the rows found, by ``text`` of their key."""
        statement = (
            f"SELECT {self.NOW}, l.id, {', '.join('l.' + it for it in COLUMNS)} "
            f"FROM {LEASES} l WHERE l.id IN ({', '.join(['%s'] * len(keys))})"
        )
        found = executor.rows(statement, keys)
        now = int(found[0][0]) if found else 0
        return now, {self.text(key): Row(*values) for _, key, *values in found}

    @staticmethod
    def text(key: Any) -> str:
        """A key as text, in whichever form the driver returns it."""
        return str(key).replace("-", "")

    # -- many --------------------------------------------------------------------------

    def renew(
        self, executor: Executor, renewals: Sequence[tuple[Any, str, int]], process: str
    ) -> set[tuple[str, str]]:
        """Renew all that live, given as key, owner and TTL; return key and owner of those renewed.

        It never waits for a row that another transaction has locked: that row is left out.

        Args:
            process: Its heartbeat is written, too; empty if none is due.
        """
        raise NotImplementedError

    def release_many(
        self, executor: Executor, releases: Sequence[tuple[Any, str]]
    ) -> set[tuple[str, str]]:
        """Free all names that nobody waits for, given as key and owner; return those freed."""
        found = executor.rows(*self._plain_releases(releases))
        return {(self.text(key), owner) for key, owner in found}

    def _plain_releases(
        self, releases: Sequence[tuple[Any, str]], returning: str = " RETURNING id, owner"
    ) -> tuple[str, list[Any]]:
        marks = ", ".join(["%s"] * len(releases))
        statement = (
            f"UPDATE {LEASES} SET ended = 'r', version = version + 1 WHERE id IN ({marks}) "
            f"AND owner IN ({marks}) AND ended = '' AND kind <> 'cooling' "
            f"AND ends_at > {self.NOW} AND queue = ''{returning}"
        )
        return statement, [*(key for key, _ in releases), *(owner for _, owner in releases)]

    def beat(self, executor: Executor, process: str, *, gone: bool = False) -> None:
        """Write a heartbeat; ``gone`` says that the process has ended normally."""
        executor.count(self._beat, (process, gone))

    def heartbeats(
        self, executor: Executor, processes: Sequence[str]
    ) -> dict[str, tuple[int, bool]]:
        """The last heartbeat of each process, and whether it has ended normally."""
        if not processes:
            return {}
        marks = ", ".join(["%s"] * len(processes))
        statement = f"SELECT id, seen_at, gone FROM {PROCESSES} WHERE id IN ({marks})"
        found = executor.rows(statement, list(processes))
        return {process: (int(seen_at), bool(gone)) for process, seen_at, gone in found}

    FACTS: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """What ``diagnose_locks`` shows of the server: a topic, the text around a value, and the
    statement that reads it."""

    def sweep(self, executor: Executor, start: Any) -> tuple[int, int]:
        """Examine some rows from this key on; return how many, and how many were deleted.

        A row is deleted once its name is free, its memory of earlier leases is old, and no copy of
        a request that it remembers can arrive any more.
        """
        over = (
            f"(l.ended <> '' OR l.ends_at <= {self.NOW}) AND l.queue = '' AND "
            f"{self.GREATEST}(l.ends_at, l.granted_at) + {self.GREATEST}(l.ttl, {MEMORY}) "
            f"< {self.NOW}"
        )
        examined = executor.rows(
            f"SELECT l.id, {over}, l.cancelled, {self.NOW} FROM {LEASES} l WHERE l.id >= %s "
            f"ORDER BY l.id LIMIT {SWEPT_AT_ONCE}",
            (start,),
        )
        # A request that is noted later makes the lease end later, or is granted: the condition of
        # the DELETE is false then.
        dead = [
            key
            for key, is_over, cancelled, now in examined
            if is_over and not is_awaited(cancelled, int(now))
        ]
        if dead:
            self._delete_dead(executor, dead, over)
        return len(examined), len(dead)

    def _delete_dead(self, executor: Executor, dead: Sequence[Any], over: str) -> None:
        highest = self.key(HIGHEST)
        marks = ", ".join(["%s"] * len(dead))
        # Rows that others have locked stay: an acquire must not wait for them.
        found = executor.rows(
            f"SELECT l.id, l.token FROM {LEASES} l WHERE l.id IN ({marks}, %s) {self.SKIP_LOCKED}",
            [*dead, highest],
        )
        tokens = {self.text(key): int(token) for key, token in found}
        known = tokens.pop(self.text(highest), None)
        if known is None and executor.rows(f"SELECT 1 FROM {LEASES} WHERE id = %s", [highest]):
            return
        dead = [key for key in dead if self.text(key) in tokens]
        if not dead:
            return
        most = max(known or 0, *tokens.values())
        if most > (known or 0):
            row = Row(version=1, token=most, ends_at=FOR_EVER)
            executor.count(self._store_highest, (highest, "", "", *row.values()))
        marks = ", ".join(["%s"] * len(dead))
        # The condition again, and no higher token than is stored: a name may have been granted
        # since the SELECT, and that lease may even have ended.
        which = f"{LEASES} l WHERE l.id IN ({marks}) AND {over} AND l.token <= %s"
        self._delete(executor, which, [*dead, most])

    def _delete(self, executor: Executor, which: str, values: Sequence[Any]) -> None:
        executor.count(f"DELETE FROM {which.replace(' l ', ' AS l ', 1)}", values)

    def forget_processes(self, executor: Executor, silent_for: int) -> None:
        """Delete the heartbeats of processes that have been silent for this many µs."""
        statement = f"DELETE FROM {PROCESSES} WHERE seen_at < {self.NOW} - %s"
        executor.count(statement, (silent_for,))
