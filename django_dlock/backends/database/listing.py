"""What operators ask of a database: pages of held locks, searches and counts."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ...lease import HolderState, Kind, LeaseInfo, LeasePage, LeaseQuery, Waiter, in_order
from ...process import ProcessIdentity
from ..holder_state import (
    SILENT_AFTER,
    holder_state,
    json_object,
    names_of,
    process_from_json,
)
from ..operator_rows import Judge, known_kind, lease_row, waiter_row
from .connection import Connection
from .rows import COLUMNS, SECOND, Row, Ticket
from .statements import LEASES, Dialect

STATE = ("kind", "process", "ttl", "granted_at", "ends_at")
TROUBLE = (*STATE, "queue", "renewals", "token")
JUDGED = {
    "holder": ("process",),
    "holder_state": STATE,
    "waiting": ("queue",),
    # Without the metadata, which would be most of what is read.
    "trouble": TROUBLE,
}
"""Fields that this process judges, and the columns from which it does."""
SORTED_BY = {
    "name": "name",
    "kind": "kind",
    "age": "-token",
    "ttl": "ends_at",
    "renewals": "renewals",
    "token": "token",
}
"""Fields that the database can sort by."""

NAMES_PER_STATEMENT = 500

Heartbeats = dict[str, tuple[int, bool]]

DAMAGE = (AttributeError, OverflowError, TypeError, ValueError)
"""Errors of a row in which another program has written."""

CANDIDATE = ("name", *TROUBLE, "metadata")
"""The columns of a ``Candidate``, after the time."""
PROCESS = 1 + CANDIDATE.index("process")


class Candidate:
    """As much of a lease as a query asks about; the attributes are those of ``LeaseInfo``."""

    __slots__ = (
        *("_text", "damaged", "granted_ttl", "holder_state", "kind", "name", "process"),
        *("renewals", "ttl", "waiting"),
    )

    unknown = ()
    renewed_ago, is_late = LeaseInfo.renewed_ago, LeaseInfo.is_late

    def __init__(self, row: Sequence[Any], beats: Heartbeats, judge: Judge) -> None:
        now, name, kind, process, ttl, granted_at, ends_at, queue, renewals, token, text = row
        self.name, self._text = str(name), text
        self.kind: Kind = known_kind(kind)
        self.process: ProcessIdentity | None = None
        self.holder_state: HolderState = "unknown"
        self.waiting, self.renewals = 0, 0
        self.ttl = self.granted_ttl = 0.0
        self.damaged: tuple[str, ...] = ()
        try:
            if process is not None:
                self.process = process_from_json(process)
            if ttl is not None:
                beat, gone = beats.get(self.process.id if self.process else "", (0, False))
                silent = _silent_for(int(now), beat, ttl, granted_at, ends_at) > SILENT_AFTER
                self.holder_state = judge(self.kind, self.process, silent, gone)
            if queue:
                self.waiting = len(Row(version=0, queue=queue).tickets(int(now)))
            if token is not None:
                operator.index(token)
                self.renewals = max(0, renewals)
                self.granted_ttl, self.ttl = ttl / SECOND, (ends_at - int(now)) / SECOND
                lost = bool(process) and self.process is None
                self.damaged = names_of(kind=kind != self.kind, process=lost)
        except DAMAGE:
            # What is left says nothing, as with a whole row.
            self.holder_state, self.damaged = "unknown", ("type",)

    @property
    def metadata(self) -> Mapping[str, Any]:
        # Often the name decides.
        return json_object(self._text)


class DatabaseListing:
    """Answers the queries of ``BaseLockBackend``."""

    def __init__(self, alias: str, key_prefix: str) -> None:
        self._alias, self._key_prefix = alias, key_prefix

    def get(self, one: Connection, dialect: Dialect, key: Any, name: str) -> LeaseInfo | None:
        now, row = dialect.read(one, key)
        if row is None or not row.lives(now):
            return None
        return self._info(name, row, now, dialect.heartbeats(one, _processes([row.process])))

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
        return waiter_row(
            name=name,
            alias=self._alias,
            owner=ticket.owner,
            now=now / SECOND,
            since=ticket.since / SECOND,
            process=ticket.process,
            metadata=ticket.metadata,
            # Its last request is its sign of life.
            silent=(now - ticket.asked_at) / SECOND > SILENT_AFTER,
        )

    def page(
        self, one: Connection, dialect: Dialect, query: LeaseQuery, offset: int, limit: int | None
    ) -> LeasePage:
        where, values = self._where(dialect, query)
        keys = [key for key in query.sort if key.removeprefix("-") != "alias"]
        judged = [*takewhile(lambda key: key.removeprefix("-") in JUDGED, keys)]
        order = _order(dialect, keys[len(judged) :])
        # What the database cannot do alone, this process does: it filters, sorts and cuts.
        by_process = query.holder_state or query.host or query.waiting
        helps = bool(judged or query.contains or query.task or by_process)
        if order is None or (helps and limit is None):
            infos = self._infos(one, dialect, f"{where} ORDER BY l.token", values)
            found = in_order(filter(query.matches, infos), query.sort)
            end = None if limit is None else offset + limit
            return LeasePage(found[offset:end], len(found))
        if helps and limit is not None:
            clause = f"{where} ORDER BY {order}"
            candidates = self._candidates(one, dialect, query, clause, values)
            names = [each.name for each in in_order(candidates, judged)]
            shown = names[offset : offset + limit]
            held = self.get_many(one, dialect, shown)
            infos = [held[name] for name in shown if name in held]
            # A name may have got another holder between the two statements.
            return LeasePage([info for info in infos if query.matches(info)], len(names))
        ((total,),) = one.rows(f"SELECT count(*) FROM {LEASES} l WHERE {where}", values)
        infos = []
        if limit != 0:
            # MySQL takes OFFSET only with a LIMIT.
            end = 2**62 if limit is None else limit
            clause = f"{where} ORDER BY {order} LIMIT {end} OFFSET {offset}"
            infos = self._infos(one, dialect, clause, values)
        return LeasePage(infos, int(total))

    def _candidates(
        self,
        one: Connection,
        dialect: Dialect,
        query: LeaseQuery,
        clause: str,
        values: Sequence[Any],
    ) -> list[Any]:
        """A ``Candidate`` for each lease that the query finds, from the columns that it asks about.

        The whole rows of all leases would take several times as long to read and to judge.
        """
        asked = _columns_for(query)
        columns = ", ".join(f"l.{each}" if each in asked else "NULL" for each in CANDIDATE)
        rows = one.rows(f"SELECT {_now(dialect)}, {columns} FROM {LEASES} l WHERE {clause}", values)
        beats: Heartbeats = {}
        if "ttl" in asked:
            beats = dialect.heartbeats(one, _processes({row[PROCESS] for row in rows}))
        # The database has checked the rest.
        checked = dataclasses.replace(query, prefix="", kind="", older_than=0.0)
        judge = functools.cache(holder_state)
        found: Iterable[Any] = (Candidate(row, beats, judge) for row in rows)
        return [*filter(checked.matches, found)]

    def _where(self, dialect: Dialect, query: LeaseQuery) -> tuple[str, list[Any]]:
        prefix = self._key_prefix
        exact, name = dialect.EXACT.format, dialect.EXACT.format("l.name")
        where = [
            "l.key_prefix = %s",
            f"{exact('l.key_prefix')} = {exact('%s')}",
            "l.ended = ''",
            f"l.ends_at > {_now(dialect)}",
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
            where.append(f"l.granted_at + %s <= {_now(dialect)}")
            values.append(int(query.older_than * SECOND))
        return " AND ".join(where), values

    def _infos(
        self, one: Connection, dialect: Dialect, clause: str, values: Sequence[Any]
    ) -> list[LeaseInfo]:
        columns = ", ".join(f"l.{column}" for column in COLUMNS)
        rows = one.rows(
            f"SELECT {_now(dialect)}, l.name, {columns} FROM {LEASES} l WHERE {clause}", values
        )
        found = [(int(now), name, Row(*rest)) for now, name, *rest in rows]
        beats = dialect.heartbeats(one, _processes({row.process for _, _, row in found}))
        judge = functools.cache(holder_state)
        return [self._info(name, row, now, beats, judge) for now, name, row in found]

    def _info(
        self, name: str, row: Row, now: int, beats: Heartbeats, judge: Judge = holder_state
    ) -> LeaseInfo:
        try:
            return self._sound_info(name, row, now, beats, judge)
        except DAMAGE:
            # SQLite stores a value of any type in any column. It must not hide the other rows.
            return lease_row(
                name=str(name),
                alias=self._alias,
                owner=str(row.owner),
                token=0,
                now=now / SECOND,
                at=now / SECOND,
                ttl=None,
                renewals=0,
                waiting=0,
                damaged=("type",),
            )

    def _sound_info(
        self, name: str, row: Row, now: int, beats: Heartbeats, judge: Judge
    ) -> LeaseInfo:
        process = process_from_json(row.process)
        beat, gone = beats.get(process.id if process else "", (0, False))
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
            process=row.process,
            metadata=row.metadata,
            silent_for=_silent_for(now, beat, row.ttl, row.granted_at, row.ends_at),
            deregistered=gone,
            judge=judge,
        )


def _order(dialect: Dialect, sort: Sequence[str]) -> str | None:
    """The ORDER BY clause; ``None`` if the database cannot sort by these fields."""
    terms = []
    for key in sort:
        plain = key.removeprefix("-")
        if plain not in SORTED_BY:
            return None
        column = SORTED_BY[plain]
        falling = key.startswith("-") is not column.startswith("-")
        term = f"l.{column.removeprefix('-')}"
        if plain in ("name", "kind"):
            term = dialect.EXACT.format(term)
        terms.append(f"{term} DESC" if falling else term)
    return ", ".join([*terms, "l.token"])


def _processes(texts: Iterable[object]) -> list[str]:
    return sorted({process.id for text in texts if (process := process_from_json(text))})


def _now(dialect: Dialect) -> str:
    """The database's time, read once in a statement and not once for each row."""
    return f"(SELECT {dialect.NOW})"


def _silent_for(now: int, beat: int, ttl: int, granted_at: int, ends_at: int) -> float:
    # A renewal proves the process alive as well as a heartbeat does.
    return max(0, now - max(beat, ends_at - ttl, granted_at)) / SECOND


def _columns_for(query: LeaseQuery) -> set[str]:
    """What this process must read of each row to find and to sort what the query wants."""
    columns = {column for key in query.sort for column in JUDGED.get(key.removeprefix("-"), ())}
    columns |= {*(STATE if query.holder_state else ()), *(("process",) if query.host else ())}
    columns |= {*(("queue",) if query.waiting else ())}
    columns |= {*(("metadata",) if query.contains or query.task else ())}
    return columns | {"name"}
