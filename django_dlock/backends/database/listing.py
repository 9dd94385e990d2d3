"""What operators ask of a database: pages of held locks, searches and counts."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ...lease import LeaseInfo, LeasePage, LeaseQuery, Waiter, in_order
from ...lease_info import KINDS
from ..holder_state import SILENT_AFTER, damaged, process_from_json, stored_object
from ..operator_rows import lease_row, waiter_row
from .connection import Connection
from .rows import COLUMNS, SECOND, Row, Ticket
from .statements import LEASES, Dialect

__all__ = ["DatabaseListing"]

SORTED_BY = {
    "name": "name",
    "kind": "kind",
    "age": "-token",
    "ttl": "ends_at",
    "renewals": "renewals",
    "token": "token",
}
"""Fields that the database can sort by; this process sorts by all others."""

NAMES_PER_STATEMENT = 500

Heartbeats = dict[str, tuple[int, bool]]


class DatabaseListing:
    """Answers the queries of ``BaseLockBackend``."""

    def __init__(self, alias: str, key_prefix: str) -> None:
        self._alias, self._key_prefix = alias, key_prefix

    def get(self, one: Connection, dialect: Dialect, key: Any, name: str) -> LeaseInfo | None:
        now, row = dialect.read(one, key)
        if row is None or not row.lives(now):
            return None
        return self._info(name, row, now, dialect.heartbeats(one, _processes([row])))

    def get_many(
        self, one: Connection, dialect: Dialect, names: Sequence[str]
    ) -> dict[str, LeaseInfo]:
        where, values = self._where(dialect, LeaseQuery())
        found: dict[str, LeaseInfo] = {}
        for start in range(0, len(names), NAMES_PER_STATEMENT):
            part = names[start : start + NAMES_PER_STATEMENT]
            clause = f"{where} AND l.name IN ({', '.join(['%s'] * len(part))})"
            infos = self._infos(one, dialect, clause, [*values, *part])
            found |= {info.name: info for info in infos}
        return found

    def waiters(self, now: int, row: Row | None, name: str, limit: int) -> list[Waiter]:
        tickets = [] if row is None else row.tickets(now)[: max(0, limit)]
        return [self._waiter(name, ticket, now) for ticket in tickets]

    def _waiter(self, name: str, ticket: Ticket, now: int) -> Waiter:
        process, facts = process_from_json(ticket.process), stored_object(ticket.metadata)
        return waiter_row(
            name=name,
            alias=self._alias,
            owner=ticket.owner,
            now=now / SECOND,
            since=ticket.since / SECOND,
            process=process,
            metadata=facts.value,
            # Its last request is its sign of life.
            silent=(now - ticket.asked_at) / SECOND > SILENT_AFTER,
            damaged=damaged(
                process=bool(ticket.process) and process is None, metadata=not facts.is_sound
            ),
        )

    def page(
        self, one: Connection, dialect: Dialect, query: LeaseQuery, offset: int, limit: int | None
    ) -> LeasePage:
        where, values = self._where(dialect, query)
        order = _order(dialect, query.sort)
        checked_here = query.contains or query.holder_state or query.host or query.task
        if order is None or checked_here:
            # The database cannot do this alone: this process filters, sorts and cuts the result.
            infos = self._infos(one, dialect, f"{where} ORDER BY l.token", values)
            found = in_order(filter(query.matches, infos), query.sort)
            end = None if limit is None else offset + limit
            return LeasePage(found[offset:end], len(found))
        ((total,),) = one.rows(f"SELECT count(*) FROM {LEASES} l WHERE {where}", values)
        infos = []
        if limit != 0:
            # MySQL takes OFFSET only with a LIMIT.
            end = 2**62 if limit is None else limit
            clause = f"{where} ORDER BY {order} LIMIT {end} OFFSET {offset}"
            infos = self._infos(one, dialect, clause, values)
        return LeasePage(infos, int(total))

    def _where(self, dialect: Dialect, query: LeaseQuery) -> tuple[str, list[Any]]:
        prefix = self._key_prefix
        exact, name = dialect.EXACT.format, dialect.EXACT.format("l.name")
        where = [
            "l.key_prefix = %s",
            f"{exact('l.key_prefix')} = {exact('%s')}",
            "l.ended = ''",
            f"l.ends_at > {dialect.NOW}",
        ]
        values: list[Any] = [prefix, prefix]
        if query.prefix:
            where.append(f"substr({name}, 1, length({exact('%s')})) = {exact('%s')}")
            values += [query.prefix, query.prefix]
        if query.contains:
            position = dialect.POSITION
            where.append(
                f"({position}({name}, {exact('%s')}) > 0 OR {position}(l.metadata, %s) > 0)"
            )
            values += [query.contains, json.dumps(query.contains)[1:-1]]
        if query.kind:
            where.append("l.kind = %s")
            values.append(query.kind)
        # These are JSON: the database leaves out most rows, and this process checks the others.
        for column, text in (("process", query.host), ("metadata", query.task)):
            if text:
                where.append(f"{dialect.POSITION}(l.{column}, %s) > 0")
                values.append(json.dumps(text)[1:-1])
        if query.older_than:
            where.append(f"l.granted_at + %s <= {dialect.NOW}")
            values.append(int(query.older_than * SECOND))
        return " AND ".join(where), values

    def _infos(
        self, one: Connection, dialect: Dialect, clause: str, values: Sequence[Any]
    ) -> list[LeaseInfo]:
        columns = ", ".join(f"l.{column}" for column in COLUMNS)
        rows = one.rows(
            f"SELECT {dialect.NOW}, l.name, {columns} FROM {LEASES} l WHERE {clause}", values
        )
        found = [(int(now), name, Row(*rest)) for now, name, *rest in rows]
        beats = dialect.heartbeats(one, _processes(row for _, _, row in found))
        return [self._info(name, row, now, beats) for now, name, row in found]

    def _info(self, name: str, row: Row, now: int, beats: Heartbeats) -> LeaseInfo:
        try:
            return self._sound_info(name, row, now, beats)
        except (AttributeError, OverflowError, TypeError, ValueError):
            # SQLite stores a value of any type in any column. It must not hide the other rows.
            return lease_row(
                name=str(name),
                alias=self._alias,
                kind="held",
                owner=str(row.owner),
                token=0,
                now=now / SECOND,
                at=now / SECOND,
                ttl=None,
                granted_ttl=None,
                renewals=0,
                waiting=0,
                process=None,
                metadata={},
                damaged=("type",),
            )

    def _sound_info(self, name: str, row: Row, now: int, beats: Heartbeats) -> LeaseInfo:
        facts = stored_object(row.metadata)
        process = process_from_json(row.process)
        beat, gone = beats.get(process.id if process else "", (0, False))
        # A renewal proves the process alive as well as a heartbeat does.
        heard = max(beat, row.ends_at - row.ttl, row.granted_at)
        return lease_row(
            name=name,
            alias=self._alias,
            kind=row.kind,
            owner=row.owner,
            token=operator.index(row.token),
            now=now / SECOND,
            at=row.granted_at / SECOND,
            ttl=(row.ends_at - now) / SECOND,
            granted_ttl=row.ttl / SECOND,
            renewals=row.renewals,
            waiting=len(row.tickets(now)),
            process=process,
            metadata=facts.value,
            silent_for=max(0, now - heard) / SECOND,
            deregistered=gone,
            damaged=damaged(
                kind=row.kind not in KINDS,
                process=bool(row.process) and process is None,
                metadata=not facts.is_sound,
            ),
        )


def _order(dialect: Dialect, sort: Sequence[str]) -> str | None:
    """The ORDER BY clause; ``None`` if the database cannot sort by these fields."""
    terms = []
    for key in sort:
        plain = key.removeprefix("-")
        if plain == "alias":
            continue
        if plain not in SORTED_BY:
            return None
        column = SORTED_BY[plain]
        falling = key.startswith("-") is not column.startswith("-")
        term = f"l.{column.removeprefix('-')}"
        if plain in ("name", "kind"):
            term = dialect.EXACT.format(term)
        terms.append(f"{term} DESC" if falling else term)
    return ", ".join([*terms, "l.token"])


def _processes(rows: Iterable[Row]) -> list[str]:
    return sorted({process.id for row in rows if (process := process_from_json(row.process))})
