"""What a Redis holds now, for operators: pages, searches and counts over the index of names.

A page in order of the grants reads the rows that it shows. For any other order or filter the
whole index is gone through, of each lease no more than the facts asked about; then the rows of
the page are read. A script looks at no more than ``NAMES_PER_CALL`` names, and others are served
between two of them. While one answer is read, the server works at the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Protocol, cast

from ..lease import SORT_KEYS, LeaseInfo, LeasePage, LeaseQuery
from .base import LeaseInfos
from .redis_commands import Keys, text
from .redis_lua import COMMON, Script
from .redis_rows import ALL_FACTS, EXACTLY, FACTS, Reader, Row
from .redis_sent import Pending

__all__ = ["RedisListing"]

NAMES_PER_CALL = 1000
ROWS_PER_CALL = 500

# Facts of a lease: fields of its hash, and those with an ``@``, which no hash has, worked out. A
# key without a TTL is shown although its lease is over: it would stay for ever. Answers are JSON,
# which both sides write and read much faster than a reply of many parts.
_LOOK = """
-- KEYS: beats, index
-- ARGV: prefix of lock keys, prefix of waiter keys, how many facts are wanted, fact...
local locks, waiters, fields, place = ARGV[1], ARGV[2], {}, {}
local facts = tonumber(ARGV[3])
for i = 1, facts do
  local fact = ARGV[3 + i]
  place[fact] = 3 + i
  if string.sub(fact, 1, 1) ~= '@' then fields[i] = fact end
end
local call, rows, procs, number_of = redis.call, {}, {}, {}
local proc_at, endless_at, waiting_at = place.proc, place['@endless'], place['@waiting']
-- Its number: it is said once with its heartbeat, however many leases it holds.
local function number(process)
  if not number_of[process] then
    local read, identity = pcall(cjson.decode, process)
    local id = read and type(identity) == 'table' and identity.id
    local beat = type(id) == 'string' and call('ZSCORE', KEYS[1], id)
    procs[#procs + 1] = {process, beat or '0'}
    -- As text: to format a number for each lease would cost more than to find the process.
    number_of[process] = tostring(#procs)
  end
  return number_of[process]
end
local function is_endless(name) return call('PTTL', locks .. name) == -1 end
local function is_held(name, owner, till, kind)
  return lives(owner, till, kind)
    or owner and owner ~= '' and not ended(kind) and is_endless(name)
end
local one, more = fields[1], #fields > 1
-- Adds {name, until, kind, fact...} to the rows, or takes a name that is free out of the index.
local function look(name)
  local l
  if more then
    l = call('HMGET', locks .. name, 'owner', 'until', 'kind', unpack(fields))
  elseif one then
    l = call('HMGET', locks .. name, 'owner', 'until', 'kind', one)
  else
    l = call('HMGET', locks .. name, 'owner', 'until', 'kind')
  end
  local owner, till, kind = l[1], l[2], l[3]
  -- Of nearly all it is plain, and to call a function costs.
  local ends = kind == 'held' and owner and owner ~= '' and tonumber(till)
  local plain = ends and ends > now
  if not plain and not is_held(name, owner, till, kind) then
    call('ZREM', KEYS[2], name)
    return
  end
  l[1] = name
  if proc_at then l[proc_at] = l[proc_at] and (number_of[l[proc_at]] or number(l[proc_at])) end
  if endless_at then l[endless_at] = is_endless(name) end
  rows[#rows + 1] = l
end
local function answer(...)
  for first = 1, waiting_at and #rows or 0, 50 do
    local last, lines = math.min(first + 49, #rows), {}
    for i = first, last do lines[#lines + 1] = waiters .. rows[i][1] end
    -- Nobody waits for nearly all, which one call tells.
    local anybody = call('EXISTS', unpack(lines)) > 0
    for i = first, last do
      rows[i][waiting_at] = anybody and call('ZCARD', waiters .. rows[i][1]) or '0'
    end
  end
  return {text(now), cjson.encode(rows), cjson.encode(procs), ...}
end
"""

ROWS = Script(
    COMMON
    + _LOOK
    + """
-- ARGV: and name...
-- Returns {now, rows of those that live, processes}.
for i = 4 + facts, #ARGV do look(ARGV[i]) end
return answer()
"""
)

# First from a rank on, then by token, which stays right while names come and go. Ends that were
# not seen are taken out on the way; a small index is cleaned as a whole before, so that ranks and
# counts are exact.
WALK = Script(
    COMMON
    + _LOOK
    + """
-- ARGV: and cursor ('' at first), first rank or '' for a search, names to look at, '1' for newest
--   first, prefix, contains
-- Returns {now, rows, processes, cursor or '' at the end, names in the index}.
local cursor, rank, size, newest, prefix, contains = unpack(ARGV, 4 + facts)
local index = KEYS[2]
size, newest = tonumber(size), newest == '1'
if cursor == '' and rank ~= '' and call('ZCARD', index) <= 1000 then
  for _, name in ipairs(call('ZRANGE', index, 0, -1)) do
    local l = call('HMGET', locks .. name, 'owner', 'until', 'kind')
    if not is_held(name, unpack(l)) then call('ZREM', index, name) end
  end
end
rank = tonumber(rank) or 0
local names = {}
if size == 0 then
  cursor = ''
elseif cursor == '' then
  names = call(newest and 'ZREVRANGE' or 'ZRANGE', index, rank, rank + size - 1)
elseif newest then
  names = call('ZREVRANGEBYSCORE', index, '(' .. cursor, '-inf', 'LIMIT', 0, size)
else
  names = call('ZRANGEBYSCORE', index, '(' .. cursor, '+inf', 'LIMIT', 0, size)
end
-- Asked for before names are taken out, and for the last one only: to format scores is dear.
cursor = size > 0 and #names == size and call('ZSCORE', index, names[size]) or ''
local all = prefix == '' and contains == ''
for _, name in ipairs(names) do
  if all or string.sub(name, 1, #prefix) == prefix and
    (contains == '' or string.find(name, contains, 1, true)) then
    look(name)
  end
end
return answer(cursor, call('ZCARD', index))
"""
)


class Ask(Protocol):
    """Runs a script within the command timeout."""

    def __call__(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int | bytes],
        *,
        name: str = "",
    ) -> Any: ...


class AskAhead(Protocol):
    """Sends the same question, whose answer is read later."""

    def __call__(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int | bytes]
    ) -> Pending[Any]: ...


class RedisListing:
    """See ``BaseLockBackend`` for the questions."""

    def __init__(self, alias: str, keys: Keys, ask: Ask, ask_ahead: AskAhead) -> None:
        self.alias, self._keys, self._ask, self._ask_ahead = alias, keys, ask, ask_ahead

    def get(self, name: str) -> LeaseInfo | None:
        rows = self._rows([name.encode()], Reader(self.alias), name)
        return rows[0].info() if rows else None

    def page(self, query: LeaseQuery, *, offset: int, limit: int | None) -> LeasePage:
        # The names of one alias are of one alias.
        sort = [key for key in query.sort if key.removeprefix("-") != "alias"]
        newest_first = sort[:1] in (["age"], ["-token"])
        if newest_first or sort[:1] in (["-age"], ["token"]):
            sort = []
        if sort or query.prefix or query.contains or query.kind or query.holder_state:
            return self._selected(query, sort, newest_first, offset, limit)
        return self._by_rank(newest_first, offset, limit)

    # -- the ways to a page ------------------------------------------------------------

    def _by_rank(self, newest_first: bool, offset: int, limit: int | None) -> LeasePage:
        """In the order of the index, whose ranks the server finds without counting."""
        reader, cursor = Reader(self.alias), ""
        # A name that is released and acquired again between two calls comes twice.
        infos: dict[str, LeaseInfo] = {}
        while True:
            wanted = ROWS_PER_CALL if limit is None else limit - len(infos)
            size = min(wanted, ROWS_PER_CALL)
            walk = self._walk(ALL_FACTS, cursor, LeaseQuery(), newest_first, rank=offset, size=size)
            *answer, cursor_, total = self._ask(*walk)
            cursor = text(cursor_)
            for row in reader.rows(ALL_FACTS, *answer):
                infos.pop(row.exact_name, None)
                infos[row.exact_name] = row.info()
            if not cursor or len(infos) == limit:
                return LeasePage(list(infos.values()), int(total))

    def _selected(
        self,
        query: LeaseQuery,
        sort: Sequence[str],
        newest_first: bool,
        offset: int,
        limit: int | None,
    ) -> LeasePage:
        """Out of all names, of which only those up to the end of the page are kept."""
        reader = Reader(self.alias)
        selection = _Selection(sort, math.inf if limit is None else offset + limit)
        facts = _facts_for(query, sort)

        def ask(cursor: str) -> Pending[Any]:
            walk = self._walk(facts, cursor, query, newest_first, size=NAMES_PER_CALL)
            return self._ask_ahead(*walk)

        pending: Pending[Any] | None = ask("")
        try:
            while pending is not None:
                *answer, cursor, _ = pending.result()
                pending = ask(text(cursor)) if cursor else None
                selection.add(_passing(reader.rows(facts, *answer), query))
        finally:
            if pending is not None:
                pending.abandon()
        names = selection.names()[offset:]
        infos: LeaseInfos = []
        for start in range(0, len(names), ROWS_PER_CALL):
            chunk = self._rows(names[start : start + ROWS_PER_CALL], reader)
            infos += [row.info() for row in chunk]
        return LeasePage(infos, selection.total)

    # -- scripts -----------------------------------------------------------------------

    def _walk(
        self,
        facts: Sequence[str],
        cursor: str,
        query: LeaseQuery,
        newest_first: bool,
        *,
        size: int,
        rank: int | None = None,
    ) -> tuple[Script, list[str], list[str | int | bytes]]:
        order, first = "1" if newest_first else "0", "" if rank is None else rank
        args = [*self._looking(facts), cursor, first, size, order, query.prefix, query.contains]
        return WALK, [self._keys.beats, self._keys.index], args

    def _rows(self, names: Sequence[bytes], reader: Reader, name: str = "") -> list[Row]:
        """All facts of those names that are not free."""
        keys, args = [self._keys.beats, self._keys.index], [*self._looking(ALL_FACTS), *names]
        return reader.rows(ALL_FACTS, *self._ask(ROWS, keys, args, name=name))

    def _looking(self, facts: Sequence[str]) -> list[str | int | bytes]:
        return [self._keys.locks, self._keys.waiters, len(facts), *facts]


def _facts_for(query: LeaseQuery, sort: Sequence[str]) -> list[str]:
    keys = {key.removeprefix("-") for key in sort}
    keys |= {"kind"} if query.kind else set()
    keys |= {"holder_state"} if query.holder_state else set()
    # What is worked out comes last.
    return sorted({fact for key in keys for fact in FACTS[key]}, reverse=True)


def _passing(rows: list[Row], query: LeaseQuery) -> list[Row]:
    if query.kind:
        rows = [row for row in rows if row.kind == query.kind]
    if query.holder_state:
        rows = [row for row in rows if row.holder_state == query.holder_state]
    return rows


class _Selection:
    """The first leases in an order, out of all that are added; memory for no more than twice those.

    Attributes:
        total: How many were added.
    """

    def __init__(self, sort: Sequence[str], size: float) -> None:
        self.total = 0
        self._size, self._best = size, list[tuple[Any, ...]]()
        self._keys = [SORT_KEYS[key.removeprefix("-")] for key in sort]
        self._falling = [key.startswith("-") for key in sort]

    def add(self, rows: Sequence[Row]) -> None:
        self.total += len(rows)
        # What each is sorted by, and its name last.
        columns = [list(map(key, cast("Sequence[LeaseInfo]", rows))) for key in self._keys]
        self._best += zip(*columns, [row.exact_name for row in rows], strict=True)
        if len(self._best) > 2 * self._size + NAMES_PER_CALL:
            self._settle()

    def names(self) -> list[bytes]:
        self._settle()
        # One that was released and acquired again on the way came twice.
        return [name.encode(*EXACTLY) for name in dict.fromkeys(best[-1] for best in self._best)]

    def _settle(self) -> None:
        for place, falling in reversed(list(enumerate(self._falling))):
            self._best.sort(key=itemgetter(place), reverse=falling)
        if self._size < len(self._best):
            del self._best[int(self._size) :]
