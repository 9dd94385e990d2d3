"""What PostgreSQL does differently from the other databases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .memory import LONG
from .prepared import Prepared
from .rows import COLUMNS, MAC, TICKET_TTL, Message, Row, micro
from .statements import HIGHEST, LEASES, PROCESSES, Dialect, Executor, Found, Released

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

FREE = "l.queue = '' AND (l.ended <> '' OR l.ends_at <= excluded.granted_at)"
"""The row's name can be granted at once."""
HELD = (
    "l.ended = '' AND l.ends_at > excluded.granted_at "
    "AND (l.kind = 'cooling' OR l.ends_at - excluded.granted_at <= l.ttl)"
)
"""Another lease lives, and the clock has not stepped back since; see ``Row._limit_to_ttl``."""
WHOLE = r"(l.queue = '' OR right(l.queue, 1) = E'\n')"
"""The last line of the queue is complete. Otherwise another ticket would become a part of it."""
GRANTED = {
    "owner": "excluded.owner",
    "kind": "excluded.kind",
    "ended": "''",
    "token": "greatest(l.token + 1, excluded.token)",
    "ttl": "excluded.ttl",
    "granted_at": "excluded.granted_at",
    "ends_at": "excluded.ends_at",
    "renewals": "0",
    "shortened": "0",
    "process": "excluded.process",
    "metadata": "excluded.metadata",
    "past": f"{Dialect.ENDING} || l.owner || E'\\n' || l.past",
}
TICKET_LINE = (
    r"concat_ws(E'\t', $4, $7, $5, $8, $9, $10, excluded.granted_at + "
    rf"{micro(TICKET_TTL)}, excluded.granted_at) || E'\n'"
)
ACQUIRE = f"""
INSERT INTO {LEASES} AS l (id, key_prefix, name, {", ".join(COLUMNS)})
VALUES ($1, $2, $3, {NOW}, $4, $5, '',
  greatest({NOW}, coalesce((SELECT token + 1 FROM {LEASES} WHERE id = $6), 0)), $7,
  {NOW}, {NOW} + $7, 0, 0, $8, $9, '', '', '')
ON CONFLICT (id) DO UPDATE SET version = l.version + 1, """
TYPES = ("uuid", "text", "text", "text", "text", "uuid", "bigint", "text", "text")
TRY = Prepared(
    "acquire",
    TYPES,
    f"""{ACQUIRE}
  {", ".join(f"{column} = {value}" for column, value in GRANTED.items())}
WHERE {FREE} AND length(l.past) < {LONG}
  AND strpos(l.owner || l.past || l.cancelled, excluded.owner) = 0
RETURNING token, NULL""",
)
"""Grants a free name."""
TRY_OR_QUEUE = Prepared(
    "acquire_or_wait",
    (*TYPES, "text"),
    f"""{ACQUIRE}
  queue = CASE WHEN {FREE} THEN '' ELSE l.queue || {TICKET_LINE} END,
  {
        ", ".join(
            f"{column} = CASE WHEN {FREE} THEN {value} ELSE l.{column} END"
            for column, value in GRANTED.items()
        )
    }
WHERE ({FREE} AND length(l.past) < {LONG} OR {HELD} AND {WHOLE})
  AND strpos(l.owner || l.past || l.cancelled || l.queue, excluded.owner) = 0
RETURNING token,
  CASE WHEN l.owner <> $4 THEN json_build_array({NOW}, row_to_json(l))::text END""",
)
"""Grants a free name; if another lease lives, appends a ticket to the queue."""


def field(number: int) -> str:
    """A field of the first ticket."""
    return rf"split_part(old.queue, E'\t', {number})"


WHOLE_TICKET = r"^[^\t\n]+\t[0-9]{1,18}\t([^\t\n]*\t){4}[0-9]{1,18}\t[0-9]{1,18}\n"
HANDED = {
    "owner": field(1),
    "kind": field(3),
    "ended": "''",
    "token": f"greatest(l.token + 1, {NOW})",
    "ttl": f"{field(2)}::bigint",
    "granted_at": NOW,
    "ends_at": f"{NOW} + {field(2)}::bigint",
    "renewals": "-1",
    "shortened": "0",
    "process": field(4),
    "metadata": field(5),
    "past": r"'r' || l.owner || E'\n' || l.past",
    "queue": r"substr(old.queue, strpos(old.queue, E'\n') + 1)",
}


def _hash(text: str) -> str:
    """The hash ``MAC`` of a text, in hexadecimal digits."""
    # Not a cast to bytea, which would take a backslash of a damaged row for an escape.
    return f"encode({MAC}(convert_to({text}, 'UTF8')), 'hex')"


MESSAGE = rf"$3 || {field(6)} || ' ' || l.owner || ' ' || l.token"
RELEASED = {column: f"l.{column}" for column in HANDED} | {"ended": "'r'"}
RELEASE = Prepared(
    "release",
    ("uuid", "text", "text"),
    rf"""
WITH old AS (
  SELECT id, queue FROM {LEASES} WHERE id = $1 AND owner = $2 AND ended = '' AND kind <> 'cooling'
    AND ends_at > {NOW} AND CASE WHEN queue = '' THEN true
      WHEN length(past) < {LONG} AND queue ~ '{WHOLE_TICKET}' THEN
        split_part(split_part(queue, E'\n', 1), E'\t', 7)::bigint > {NOW}
      ELSE false END
  FOR NO KEY UPDATE
)
UPDATE {LEASES} l SET version = l.version + 1, {
        ", ".join(
            f"{column} = CASE old.queue WHEN '' THEN {RELEASED[column]} ELSE {value} END"
            for column, value in HANDED.items()
        )
    }
FROM old WHERE l.id = old.id
RETURNING CASE WHEN old.queue <> '' THEN l.owner ELSE '' END, l.process,
  CASE WHEN {field(6)} <> '' THEN pg_notify({field(6)}, l.owner || ' ' || l.token ||
    CASE $3 WHEN '' THEN '' ELSE ' ' || {_hash(f"$3 || {_hash(MESSAGE)}")} END) END""",
)
"""Frees the name, or hands the lease over to the first waiter, if its ticket is valid."""


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

    def acquire(
        self,
        executor: Executor,
        key: Any,
        names: tuple[str, str],
        asked: Sequence[Any],
        channel: str | None,
    ) -> int | Found:
        values = [key, *names, *asked]
        values.insert(5, self.key(HIGHEST))
        if channel is None:
            answer = executor.prepared(TRY, values)
        else:
            answer = executor.prepared(TRY_OR_QUEUE, [*values, channel])
        if not answer:
            return 0
        ((token, queued),) = answer
        if queued is None:
            return int(token)
        now, columns = json.loads(queued)
        return int(now), Row(*(columns[column] for column in COLUMNS)), False

    def release(self, executor: Executor, key: Any, owner: str, mac_key: str) -> Released | None:
        answer = executor.prepared(RELEASE, (key, owner, mac_key))
        return Released(*answer[0][:2]) if answer else None

    def renew(
        self, executor: Executor, renewals: Sequence[tuple[Any, str, int]], process: str
    ) -> set[tuple[str, str]]:
        keys, owners, ttls = zip(*renewals, strict=True)
        ends = self.KEPT.format(now="renewable.now", until="(renewable.now + renewable.ttl)")
        beat, values = ("", []) if not process else (BEAT, [process] * 3)
        # The conditions stand inside the LATERAL, where each row is found by its key. In a join,
        # the planner would estimate them, and may compare all rows with all.
        statement = f"""
WITH renewable AS (
  SELECT r.id, r.ttl, r.now FROM (
    SELECT unnest(%s::text[])::uuid AS id, unnest(%s::text[]) AS owner, unnest(%s::bigint[]) AS ttl,
      {self.NOW} AS now
  ) r CROSS JOIN LATERAL (
    SELECT FROM {LEASES} WHERE id = r.id AND owner = r.owner AND ended = '' AND kind <> 'cooling'
      AND ends_at > r.now FOR NO KEY UPDATE SKIP LOCKED
  ) unlocked
){beat}
UPDATE {LEASES} l SET ends_at = {ends}, ttl = greatest(renewable.ttl, {ends} - renewable.now),
  renewals = greatest(l.renewals, 0) + 1, version = l.version + 1
FROM renewable WHERE l.id = renewable.id
RETURNING l.id, l.owner"""
        arrays = [[str(key) for key in keys], list(owners), list(ttls)]
        renewed = executor.rows(statement, [*arrays, *values])
        return {(self.text(key), owner) for key, owner in renewed}
