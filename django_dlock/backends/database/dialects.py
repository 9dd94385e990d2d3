"""The statements, and where the three kinds of databases differ in them.

Most operations meet a plain row and are one statement. Any other row is read, changed as
``rows.py`` says, and written on condition that nobody has changed it since: ``write`` and
``insert`` answer whether that was so.

Every statement is repeated after a lost reply, so each finds its own work done.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from .rows import COLUMNS, MEMORY, PAST_LENGTH, Message, Row

__all__ = ["LEASES", "PROCESSES", "Dialect", "MySQL", "PostgreSQL", "SQLite", "Talk"]

LEASES, PROCESSES = "django_dlock_leaserecord", "django_dlock_processrecord"
"""Tables of ``models.LeaseRecord`` and ``models.ProcessRecord``."""

SWEPT_AT_ONCE = 50
"""Rows that one look of the sweep goes through."""


class Talk(Protocol):
    """What a dialect needs of a connection."""

    last_id: int

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    def count(self, statement: str, parameters: Sequence[Any] = ()) -> int: ...


class Dialect:
    """The statements as PostgreSQL and SQLite take them; ``MySQL`` replaces ``_acquire``."""

    NOW: ClassVar[str]
    """Microseconds since the epoch on the database's clock."""
    GREATEST: ClassVar[str] = "greatest"
    POSITION: ClassVar[str] = "strpos"
    EXACT: ClassVar[str] = "{}"
    """Makes a column's text be compared byte by byte."""

    def __init__(self) -> None:
        columns = ", ".join(COLUMNS)
        self._read = (
            f"SELECT {self.NOW}, {', '.join('l.' + it for it in COLUMNS)} "
            f"FROM (SELECT 1 AS one) o LEFT JOIN {LEASES} l ON l.id = %s"
        )
        self._insert = (
            f"INSERT INTO {LEASES} (id, key_prefix, name, {columns}) "
            f"VALUES ({', '.join(['%s'] * (3 + len(COLUMNS)))}) ON CONFLICT DO NOTHING"
        )
        self._acquire = f"""
INSERT INTO {LEASES} AS l (id, key_prefix, name, {columns})
SELECT %s, %s, %s, t.now, %s, %s, '', t.now, %s, t.now, t.now + %s, 0, 0, %s, %s, '', '', ''
FROM (SELECT {self.NOW} AS now) t WHERE true
ON CONFLICT (id) DO UPDATE SET
  past = CASE WHEN l.owner = '' THEN l.past ELSE substr({self.LETTER} || l.owner || '\n' || l.past,
    1, {PAST_LENGTH}) END,
  version = l.version + 1, owner = excluded.owner, kind = excluded.kind, ended = '',
  token = {self.GREATEST}(l.token + 1, excluded.token), ttl = excluded.ttl,
  granted_at = excluded.granted_at, ends_at = excluded.ends_at, renewals = 0, shortened = 0,
  process = excluded.process, metadata = excluded.metadata
WHERE (l.ended <> '' OR l.ends_at <= excluded.granted_at) AND l.queue = ''
  AND l.owner <> excluded.owner AND {self.POSITION}(l.past, excluded.owner) = 0
  AND (l.cancelled = '' OR {self.POSITION}(l.cancelled, excluded.owner) = 0)
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

    LETTER: ClassVar[str] = (
        "CASE WHEN l.ended = '' AND l.kind <> 'cooling' THEN 'e' WHEN l.ended = '' THEN 'r' "
        "ELSE l.ended END"
    )
    """How the last lease of a free row ended; see ``Row.outcome``."""
    KEPT: ClassVar[str] = (
        "CASE WHEN l.ends_at > {until} AND l.ends_at - {now} <= l.ttl THEN l.ends_at "
        "ELSE {until} END"
    )
    """The end after a renewal: a shorter one takes nothing away; see ``Row.renew``."""

    @staticmethod
    def key(digest: bytes) -> Any:
        """The primary key of a row, as the driver takes it."""
        # A UUID made from a name; MariaDB takes none that is of no kind.
        return uuid.UUID(bytes=digest, version=5)

    # -- one row -----------------------------------------------------------------------

    def acquire(self, talk: Talk, key: Any, names: tuple[str, str], asked: Sequence[Any]) -> int:
        """Grant a name that is plainly free; the token, or 0.

        In all other cases the row is read, and ``Row.acquire`` in ``rows.py`` decides.

        Args:
            names: Key prefix and name.
            asked: Owner, kind, TTL, process and metadata.
        """
        owner, kind, ttl, process, metadata = asked
        values = (key, *names, owner, kind, ttl, ttl, process, metadata)
        rows = talk.rows(self._acquire, values)
        return int(rows[0][0]) if rows else 0

    def release(self, talk: Talk, key: Any, owner: str) -> bool:
        """Free a name for which nobody waits; whether it was so."""
        return talk.count(self._release, (key, owner)) > 0

    def read(self, talk: Talk, key: Any) -> tuple[int, Row | None]:
        """The time, and the row if there is one."""
        now, *values = talk.rows(self._read, (key,))[0]
        return int(now), None if values[0] is None else Row(*values)

    def insert(
        self, talk: Talk, key: Any, names: tuple[str, str], row: Row, messages: Iterable[Message]
    ) -> bool:
        return talk.count(self._insert, (key, *names, *row.values())) > 0

    def write(
        self, talk: Talk, key: Any, before: Sequence[Any], row: Row, messages: Sequence[Message]
    ) -> bool:
        """Write what has changed, unless somebody has changed the row since it was read."""
        row.version = before[0] + 1
        changed = [
            (column, new)
            for column, new, old in zip(COLUMNS, row.values(), before, strict=True)
            if new != old
        ]
        assignments = ", ".join(f"{column} = %s" for column, _ in changed)
        statement = f"UPDATE {LEASES} SET {assignments} WHERE id = %s AND version = %s"
        values = [*(new for _, new in changed), key, before[0]]
        return self._written(talk, statement, values, messages)

    def _written(
        self, talk: Talk, statement: str, values: list[Any], messages: Sequence[Message]
    ) -> bool:
        return talk.count(statement, values) > 0

    def read_many(self, talk: Talk, keys: Sequence[Any]) -> tuple[int, dict[str, Row]]:
        """The time, and the rows that there are, by ``text`` of their key."""
        statement = (
            f"SELECT {self.NOW}, l.id, {', '.join('l.' + it for it in COLUMNS)} "
            f"FROM {LEASES} l WHERE l.id IN ({', '.join(['%s'] * len(keys))})"
        )
        found = talk.rows(statement, keys)
        now = int(found[0][0]) if found else 0
        return now, {self.text(key): Row(*values) for _, key, *values in found}

    @staticmethod
    def text(key: Any) -> str:
        """A key as text, whichever way the driver gives it."""
        return str(key).replace("-", "")

    # -- many --------------------------------------------------------------------------

    def renew(self, talk: Talk, renewals: Sequence[tuple[Any, str, int]], process: str) -> set[str]:
        """Prolong all that live, as key, owner and TTL; the keys of those that were, as text.

        Args:
            process: Note that it lives; empty where that was noted lately.
        """
        raise NotImplementedError

    def release_many(self, talk: Talk, releases: Sequence[tuple[Any, str]]) -> set[tuple[str, str]]:
        """Free all names for which nobody waits, given as key and owner; those that were so."""
        found = talk.rows(*self._plain_releases(releases))
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

    def beat(self, talk: Talk, process: str, *, gone: bool = False) -> None:
        """Note that the process lives, or that it has ended in order."""
        talk.count(self._beat, (process, gone))

    def heartbeats(self, talk: Talk, processes: Sequence[str]) -> dict[str, tuple[int, bool]]:
        """When each was last heard of, and whether it has ended in order."""
        if not processes:
            return {}
        marks = ", ".join(["%s"] * len(processes))
        statement = f"SELECT id, seen_at, gone FROM {PROCESSES} WHERE id IN ({marks})"
        found = talk.rows(statement, list(processes))
        return {process: (int(seen_at), bool(gone)) for process, seen_at, gone in found}

    def sweep(self, talk: Talk, start: Any) -> tuple[int, int]:
        """Look at some rows from this key on; how many there were, and how many are deleted.

        Rows are deleted once their name is free and what they remember is old.
        """
        over = (
            f"(l.ended <> '' OR l.ends_at <= {self.NOW}) AND l.queue = '' AND "
            f"{self.GREATEST}(l.ends_at, l.granted_at) + {self.GREATEST}(l.ttl, {MEMORY}) "
            f"< {self.NOW}"
        )
        looked = talk.rows(
            f"SELECT l.id, {over} FROM {LEASES} l WHERE l.id >= %s "
            f"ORDER BY l.id LIMIT {SWEPT_AT_ONCE}",
            (start,),
        )
        dead = [key for key, is_over in looked if is_over]
        if dead:
            marks = ", ".join(["%s"] * len(dead))
            # Looked at once more: a name may have been granted since.
            self._delete(talk, f"{LEASES} l WHERE l.id IN ({marks}) AND {over}", dead)
        return len(looked), len(dead)

    def _delete(self, talk: Talk, which: str, values: Sequence[Any]) -> None:
        talk.count(f"DELETE FROM {which.replace(' l ', ' AS l ', 1)}", values)

    def forget_processes(self, talk: Talk, seen_before: int) -> None:
        """Delete the heartbeats of processes that nobody has heard of for so many µs."""
        statement = f"DELETE FROM {PROCESSES} WHERE seen_at < {self.NOW} - %s"
        talk.count(statement, (seen_before,))


class PostgreSQL(Dialect):
    NOW = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"
    EXACT = '{} COLLATE "C"'

    def _written(
        self, talk: Talk, statement: str, values: list[Any], messages: Sequence[Message]
    ) -> bool:
        if not messages:
            return talk.count(statement, values) > 0
        marks = ", ".join(["(%s::text, %s::text)"] * len(messages))
        for message in messages:
            values += [message.channel, message.payload]
        told = talk.rows(
            f"WITH written AS ({statement} RETURNING 1) SELECT pg_notify(m.channel, m.said) "
            f"FROM written, (VALUES {marks}) m (channel, said)",
            values,
        )
        return bool(told)

    def renew(self, talk: Talk, renewals: Sequence[tuple[Any, str, int]], process: str) -> set[str]:
        keys, owners, ttls = zip(*renewals, strict=True)
        ends = self.KEPT.format(now="r.now", until="(r.now + r.ttl)")
        beat, values = "", list[Any]()
        if process:
            beat, values = f", beat AS ({self._beat})", [process, False]
        statement = f"""
WITH r AS (
  SELECT unnest(%s::text[])::uuid AS id, unnest(%s::text[]) AS owner, unnest(%s::bigint[]) AS ttl,
    {self.NOW} AS now
){beat}
UPDATE {LEASES} l SET ends_at = {ends}, ttl = greatest(r.ttl, {ends} - r.now),
  renewals = greatest(l.renewals, 0) + 1, version = l.version + 1
FROM r WHERE l.id = r.id AND l.owner = r.owner AND l.ended = '' AND l.kind <> 'cooling'
  AND l.ends_at > r.now
RETURNING l.id"""
        arrays = [[str(key) for key in keys], list(owners), list(ttls)]
        return {self.text(key) for (key,) in talk.rows(statement, [*arrays, *values])}


class SQLite(Dialect):
    NOW = "dlock_now()"
    GREATEST = "max"
    POSITION = "instr"

    @staticmethod
    def key(digest: bytes) -> Any:
        return digest.hex()

    def renew(self, talk: Talk, renewals: Sequence[tuple[Any, str, int]], process: str) -> set[str]:
        if process:
            self.beat(talk, process)
        ends = self.KEPT.format(now="t.now", until="(t.now + r.ttl)")
        marks = ", ".join(["(%s, %s, %s)"] * len(renewals))
        statement = f"""
WITH r (id, owner, ttl) AS (VALUES {marks}), t (now) AS (SELECT {self.NOW})
UPDATE {LEASES} AS l SET ends_at = {ends}, ttl = max(r.ttl, {ends} - t.now),
  renewals = max(l.renewals, 0) + 1, version = l.version + 1
FROM r, t WHERE l.id = r.id AND l.owner = r.owner AND l.ended = '' AND l.kind <> 'cooling'
  AND l.ends_at > t.now
RETURNING id"""
        values = [value for renewal in renewals for value in renewal]
        return {self.text(key) for (key,) in talk.rows(statement, values)}


class MySQL(Dialect):
    """MySQL and MariaDB: an UPDATE returns nothing there, but for one number."""

    # In UTC, where no hour comes twice, and told to replicas with the statement.
    NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    POSITION = "INSTR"
    EXACT = "CAST({} AS BINARY)"

    def __init__(self) -> None:
        super().__init__()
        self._insert = self._insert.replace(" ON CONFLICT DO NOTHING", "")
        # Assigned from left to right: what comes later sees the new value.
        self._acquire = f"""
UPDATE {LEASES} l SET
  past = CASE WHEN l.owner = '' THEN l.past ELSE LEFT(CONCAT({self.LETTER}, l.owner, '\n', l.past),
    {PAST_LENGTH}) END,
  version = l.version + 1, owner = %s, kind = %s, ended = '',
  token = LAST_INSERT_ID(GREATEST(l.token + 1, {self.NOW})), ttl = %s, granted_at = {self.NOW},
  ends_at = {self.NOW} + %s, renewals = 0, shortened = 0, process = %s, metadata = %s
WHERE l.id = %s AND (l.ended <> '' OR l.ends_at <= {self.NOW}) AND l.queue = ''
  AND l.owner <> %s AND INSTR(l.past, %s) = 0 AND INSTR(l.cancelled, %s) = 0"""
        self._beat = (
            f"INSERT INTO {PROCESSES} (id, seen_at, gone) VALUES (%s, {self.NOW}, %s) "
            "ON DUPLICATE KEY UPDATE seen_at = VALUES(seen_at), gone = VALUES(gone)"
        )

    @staticmethod
    def key(digest: bytes) -> Any:
        return uuid.UUID(bytes=digest, version=5).hex

    def acquire(self, talk: Talk, key: Any, names: tuple[str, str], asked: Sequence[Any]) -> int:
        owner, kind, ttl, process, metadata = asked
        values = (owner, kind, ttl, ttl, process, metadata, key, owner, owner, owner)
        # A name that has no row is inserted by the slow path.
        return talk.last_id if talk.count(self._acquire, values) else 0

    def renew(self, talk: Talk, renewals: Sequence[tuple[Any, str, int]], process: str) -> set[str]:
        if process:
            self.beat(talk, process)
        keys, owners, ttls = zip(*renewals, strict=True)
        marks = ", ".join(["%s"] * len(renewals))
        # All have the same TTL nearly always.
        ttl = "%s" if len(set(ttls)) == 1 else f"ELT(FIELD(l.owner, {marks}), {marks}) + 0"
        values = [ttls[0]] if ttl == "%s" else [*owners, *ttls]
        ends = self.KEPT.format(now=self.NOW, until=f"({self.NOW} + {ttl})")
        # ``ends_at`` is the new one where ``ttl`` is set.
        statement = f"""
UPDATE {LEASES} l SET ends_at = {ends}, ttl = l.ends_at - {self.NOW},
  renewals = GREATEST(l.renewals, 0) + 1, version = l.version + 1
WHERE l.id IN ({marks}) AND l.owner IN ({marks}) AND l.ended = '' AND l.kind <> 'cooling'
  AND l.ends_at > {self.NOW}"""
        parameters = [*values, *values, *keys, *owners]
        if talk.count(statement, parameters) == len(renewals):
            return {self.text(key) for key in keys}
        now, rows = self.read_many(talk, keys)
        return {
            self.text(key)
            for key, owner, _ in renewals
            if (row := rows.get(self.text(key))) and row.outcome_of(owner, now) is None
        }

    def release_many(self, talk: Talk, releases: Sequence[tuple[Any, str]]) -> set[tuple[str, str]]:
        all_of_them = talk.count(*self._plain_releases(releases, "")) == len(releases)
        # Else each is asked about again, which does no harm.
        return {(self.text(key), owner) for key, owner in releases} if all_of_them else set()

    def _delete(self, talk: Talk, which: str, values: Sequence[Any]) -> None:
        talk.count(f"DELETE l FROM {which}", values)
