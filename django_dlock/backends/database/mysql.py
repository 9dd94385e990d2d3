"""What MySQL and MariaDB do differently from the other databases."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from .connection import Failure
from .memory import LONG
from .statements import LEASES, PROCESSES, Dialect, Executor


class MySQL(Dialect):
    """MySQL and MariaDB, where an UPDATE can return one number only, with ``LAST_INSERT_ID``."""

    FACTS = (
        ("server", "{}", "SELECT CONCAT(@@version_comment, ' ', @@version)"),
        (
            "persistence",
            "innodb_flush_log_at_trx_commit is {}",
            "SELECT @@innodb_flush_log_at_trx_commit",
        ),
        ("connections", "the server takes {}", "SELECT @@max_connections"),
    )
    # UTC has no repeated hour, and this function replicates as a statement.
    NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    POSITION = "INSTR"
    EXACT = "CAST({} AS BINARY)"

    def __init__(self) -> None:
        super().__init__()
        self._insert = self._insert.replace(" ON CONFLICT DO NOTHING", "")
        self._store_highest = (
            f"{self._insert} ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))"
        )
        # MySQL assigns from left to right: later expressions see the new values.
        self._acquire = f"""
UPDATE {LEASES} l SET
  past = CASE WHEN l.owner = '' THEN l.past ELSE CONCAT({self.ENDING}, l.owner, '\n', l.past) END,
  version = l.version + 1, owner = %s, kind = %s, ended = '',
  token = LAST_INSERT_ID(GREATEST(l.token + 1, {self.NOW})), ttl = %s, granted_at = {self.NOW},
  ends_at = {self.NOW} + %s, renewals = 0, shortened = 0, process = %s, metadata = %s
WHERE l.id = %s AND (l.ended <> '' OR l.ends_at <= {self.NOW}) AND l.queue = ''
  AND CHAR_LENGTH(l.past) < {LONG}
  AND l.owner <> %s AND INSTR(l.past, %s) = 0 AND INSTR(l.cancelled, %s) = 0"""
        self._beat = (
            f"INSERT INTO {PROCESSES} (id, seen_at, gone) VALUES (%s, {self.NOW}, %s) "
            "ON DUPLICATE KEY UPDATE seen_at = VALUES(seen_at), gone = VALUES(gone)"
        )

    @staticmethod
    def key(digest: bytes) -> Any:
        return uuid.UUID(bytes=digest, version=5).hex

    def acquire(
        self,
        executor: Executor,
        key: Any,
        names: tuple[str, str],
        asked: Sequence[Any],
        channel: str | None,
    ) -> int:
        owner, kind, ttl, process, metadata = asked
        values = (owner, kind, ttl, ttl, process, metadata, key, owner, owner, owner)
        # A name without a row is inserted by the caller, which reads the row first.
        return executor.last_id if executor.count(self._acquire, values) else 0

    def renew(
        self, executor: Executor, renewals: Sequence[tuple[Any, str, int]], process: str
    ) -> set[tuple[str, str]]:
        if process and not self._is_locked(executor, PROCESSES, process):
            self.beat(executor, process)
        # An UPDATE would wait for the rows that others have locked. One may be locked after this.
        unlocked = self._unlocked(executor, LEASES, [key for key, _, _ in renewals])
        renewals = [renewal for renewal in renewals if self.text(renewal[0]) in unlocked]
        if not renewals:
            return set()
        keys, owners, ttls = zip(*renewals, strict=True)
        marks = ", ".join(["%s"] * len(renewals))
        # Nearly always all have the same TTL.
        ttl = "%s" if len(set(ttls)) == 1 else f"ELT(FIELD(l.owner, {marks}), {marks}) + 0"
        values = [ttls[0]] if ttl == "%s" else [*owners, *ttls]
        ends = self.KEPT.format(now=self.NOW, until=f"({self.NOW} + {ttl})")
        # When ``ttl`` is assigned, ``ends_at`` already has its new value. Without the hint, MariaDB
        # may read the whole table, and so meet rows that are locked and not asked for.
        statement = f"""
UPDATE {LEASES} l FORCE INDEX (PRIMARY) SET ends_at = {ends}, ttl = l.ends_at - {self.NOW},
  renewals = GREATEST(l.renewals, 0) + 1, version = l.version + 1
WHERE l.id IN ({marks}) AND l.owner IN ({marks}) AND l.ended = '' AND l.kind <> 'cooling'
  AND l.ends_at > {self.NOW}"""
        parameters = [*values, *values, *keys, *owners]
        try:
            count = executor.count(_at_once(executor) + statement, parameters)
        except Failure as error:
            if error.kind != "transient":
                raise
            # None is renewed; the caller asks again.
            return set()
        if count == len(renewals):
            return {(self.text(key), owner) for key, owner, _ in renewals}
        now, rows = self.read_many(executor, keys)
        return {
            (self.text(key), owner)
            for key, owner, _ in renewals
            if (row := rows.get(self.text(key))) and row.outcome_of(owner, now) is None
        }

    def _unlocked(self, executor: Executor, table: str, keys: Sequence[Any]) -> set[str]:
        """Those of the rows that no other transaction has locked."""
        marks = ", ".join(["%s"] * len(keys))
        statement = f"SELECT id FROM {table} WHERE id IN ({marks}) ORDER BY id {self.SKIP_LOCKED}"
        return {self.text(key) for (key,) in executor.rows(statement, keys)}

    def _is_locked(self, executor: Executor, table: str, key: Any) -> bool:
        if self._unlocked(executor, table, [key]):
            return False
        return bool(executor.rows(f"SELECT 1 FROM {table} WHERE id = %s", [key]))

    def release_many(
        self, executor: Executor, releases: Sequence[tuple[Any, str]]
    ) -> set[tuple[str, str]]:
        all_of_them = executor.count(*self._plain_releases(releases, "")) == len(releases)
        # If not all, the caller asks about each of them; that does no harm.
        return {(self.text(key), owner) for key, owner in releases} if all_of_them else set()

    def _delete(self, executor: Executor, which: str, values: Sequence[Any]) -> None:
        executor.count(f"DELETE l FROM {which}", values)


def _at_once(executor: Executor) -> str:
    """A prefix that makes a statement fail instead of waiting for a locked row.

    MySQL has none; there, the connection's own limit applies.
    """
    is_mariadb = "mariadb" in executor.server.lower()
    return "SET STATEMENT innodb_lock_wait_timeout = 0 FOR " if is_mariadb else ""
