"""What PostgreSQL does differently from the other databases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .rows import COLUMNS, Message, Row
from .statements import LEASES, PROCESSES, Dialect, Executor, Found

__all__ = ["PostgreSQL"]

NOW = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"
# Neither part waits for a row that another transaction has locked.
BEAT = f"""
, first_beat AS (
  INSERT INTO {PROCESSES} (id, seen_at, gone) SELECT %s, {NOW}, false
  WHERE NOT EXISTS (SELECT 1 FROM {PROCESSES} WHERE id = %s) ON CONFLICT DO NOTHING
), beat AS (
  UPDATE {PROCESSES} SET seen_at = {NOW}, gone = false WHERE id IN (
    SELECT id FROM {PROCESSES} WHERE id = %s FOR NO KEY UPDATE SKIP LOCKED)
)"""

RELEASE = f"""
UPDATE {LEASES} l SET ended = CASE queue WHEN '' THEN 'r' ELSE '' END,
  version = version + (queue = '')::int
WHERE id = %s AND owner = %s AND ended = '' AND kind <> 'cooling' AND ends_at > {NOW}
RETURNING CASE WHEN queue <> '' THEN json_build_array({NOW}, row_to_json(l))::text END"""


class PostgreSQL(Dialect):
    FACTS = (
        ("server", "PostgreSQL {}", "SHOW server_version"),
        ("replicas", "{} connected", "SELECT count(*) FROM pg_stat_replication"),
        ("persistence", "synchronous_commit is {}", "SHOW synchronous_commit"),
        ("connections", "the server takes {}", "SHOW max_connections"),
    )
    NOW = NOW
    EXACT = '{} COLLATE "C"'

    def _written(
        self, executor: Executor, statement: str, values: list[Any], messages: Sequence[Message]
    ) -> bool:
        if not messages:
            return executor.count(statement, values) > 0
        # One column for all of them: a statement may not return more than 1664.
        notify = (
            "(SELECT count(pg_notify(channel, payload)) "
            "FROM unnest(%s::text[], %s::text[]) AS m (channel, payload))"
        )
        values.append([message.channel for message in messages])
        values.append([message.payload for message in messages])
        return bool(executor.rows(f"{statement} RETURNING {notify}", values))

    def release(self, executor: Executor, key: Any, owner: str) -> bool | Found:
        answer = executor.rows(RELEASE, (key, owner))
        if not answer or answer[0][0] is None:
            return bool(answer)
        # Somebody waits: the row, which was not changed, comes with the answer.
        now, columns = json.loads(answer[0][0])
        return int(now), Row(*(columns[column] for column in COLUMNS)), False

    def renew(
        self, executor: Executor, renewals: Sequence[tuple[Any, str, int]], process: str
    ) -> set[tuple[str, str]]:
        keys, owners, ttls = zip(*renewals, strict=True)
        ends = self.KEPT.format(now="r.now", until="(r.now + r.ttl)")
        beat, values = ("", []) if not process else (BEAT, [process] * 3)
        statement = f"""
WITH r AS (
  SELECT unnest(%s::text[])::uuid AS id, unnest(%s::text[]) AS owner, unnest(%s::bigint[]) AS ttl,
    {self.NOW} AS now
), free AS (
  SELECT id FROM {LEASES} WHERE id IN (SELECT id FROM r) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
){beat}
UPDATE {LEASES} l SET ends_at = {ends}, ttl = greatest(r.ttl, {ends} - r.now),
  renewals = greatest(l.renewals, 0) + 1, version = l.version + 1
FROM r JOIN free ON free.id = r.id WHERE l.id = r.id AND l.owner = r.owner AND l.ended = ''
  AND l.kind <> 'cooling' AND l.ends_at > r.now
RETURNING l.id, l.owner"""
        arrays = [[str(key) for key in keys], list(owners), list(ttls)]
        renewed = executor.rows(statement, [*arrays, *values])
        return {(self.text(key), owner) for key, owner in renewed}
