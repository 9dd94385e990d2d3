"""Pages, searches and counts of the present leases, for operators; uses the index of names.

A page in the order of the grants reads only the rows that it shows. Any other order or filter
reads the whole index, but only the facts that it needs of each lease, and then the rows of the
page. One script reads at most ``NAMES_PER_CALL`` names, so that the server can serve other
clients in between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeAlias, cast

from ...lease import SEARCHED, SORT_KEYS, LeaseInfo, LeasePage, LeaseQuery
from ..base import LeaseInfos
from ..holder_state import LONGEST
from .commands import Keys, text
from .rows import ALL_FACTS, FACTS, WRONG_TYPE, Reader, Row
from .script_parts import COMMON, Script

__all__ = ["RedisListing"]

NAMES_PER_CALL = 1000
ROWS_PER_CALL = 500

# Facts of a lease are fields of its hash; those that begin with ``@`` are computed. A key without a
# TTL is listed even if its lease is over, because it would stay for ever. Answers are JSON, which
# both sides write and read much faster than a reply of many parts.
_COLLECT = """
-- KEYS: index
-- ARGV: prefix of all keys, number of facts, fact...
local locks, waiters, channels = ARGV[1] .. 'l:', ARGV[1] .. 'q:', ARGV[1] .. 'm:'
local facts, fields, column_of = tonumber(ARGV[2]), {}, {}
for i = 1, facts do
  local fact = ARGV[2 + i]
  column_of[fact] = 3 + i
  if string.sub(fact, 1, 1) ~= '@' then fields[i] = fact end
end
local call, try, rows, procs, number_of = redis.call, redis.pcall, {}, {}, {}
-- A huge value would take the time and the memory of everybody who reads the page.
local function brief(value)
  return #value <= LONGEST and value or string.sub(value, 1, LONGEST)
end
local proc_at, endless_at, waiting_at = column_of.proc, column_of['@endless'], column_of['@waiting']
local function known(process)
  local beat, identity = string.match(
    read('GET', ARGV[1] .. 'p:' .. process) or '', '^(%S*) (.*)$')
  return brief(beat or '0'), brief(identity or '')
end
-- Rows refer to a process by number, so that its identity and heartbeat are sent only once.
local function number(process)
  if not number_of[process] then
    local beat, identity = known(process)
    procs[#procs + 1] = {identity, beat}
    -- As text, because formatting a number for each lease is slower than finding the process.
    number_of[process] = tostring(#procs)
  end
  return number_of[process]
end
local function is_endless(name) return call('PTTL', locks .. name) == -1 end
local function is_held(name, owner, till, kind)
  return lives(owner, till, kind)
    or owner and owner ~= '' and not ended(kind) and is_endless(name)
end
-- Count waiters whose process is listening or has sent a heartbeat lately; the others are gone.
local is_there = {}
local function waiting(name)
  local count = 0
  for _, waiter in ipairs(read('ZRANGE', waiters .. name, 0, -1) or {}) do
    local process = string.match(waiter, '^.-\\n.-\\n.-\\n(.-)\\n') or ''
    if is_there[process] == nil then
      local listeners = redis.pcall('PUBSUB', 'NUMSUB', channels .. process)[2] or 0
      is_there[process] = listeners > 0 or now - (tonumber((known(process))) or 0) < 15000
    end
    if is_there[process] then count = count + 1 end
  end
  return tostring(count)
end
-- Adds {name, until, kind, fact...} to the rows, or removes a free name from the index.
local function collect(name)
  local l = try('HMGET', locks .. name, 'owner', 'until', 'kind', unpack(fields))
  if l.err then
    -- Another program has put something else there. It stays in the index, so that it is seen.
    l = read('HMGET', locks .. name, 'owner') or {name, '', 'WRONG_TYPE'}
    for i = 4, 3 + facts do l[i] = false end
    if endless_at then l[endless_at] = true end
    rows[#rows + 1] = l
    return
  end
  local owner, till, kind = l[1], l[2], l[3]
  -- For most names this is enough, and a function call is slow.
  local ends = kind == 'held' and owner and owner ~= '' and tonumber(till)
  local plain = ends and ends > now
  if not plain and not is_held(name, owner, till, kind) then
    call('ZREM', KEYS[1], name)
    return
  end
  for i = 2, 3 + #fields do
    local value = l[i]
    if value and #value > LONGEST then l[i] = brief(value) end
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
    -- Most names have no waiters, which one call finds out for many of them.
    local anybody = call('EXISTS', unpack(lines)) > 0
    for i = first, last do rows[i][waiting_at] = anybody and waiting(rows[i][1]) or '0' end
  end
  return {text(now), cjson.encode(rows), cjson.encode(procs), ...}
end
""".replace("LONGEST", str(LONGEST)).replace("WRONG_TYPE", WRONG_TYPE)

ROWS = Script(
    COMMON
    + _COLLECT
    + """
-- ARGV: those above, then name...
-- Returns {now, rows of the names that are held, processes}.
for i = 3 + facts, #ARGV do collect(ARGV[i]) end
return answer()
"""
)

# Starts at a rank and continues by token, which stays correct while names come and go. Removes
# names whose lease has expired. A small index is cleaned completely first, so that ranks and
# counts are exact.
WALK = Script(
    COMMON
    + _COLLECT
    + """
-- ARGV: those above, then cursor ('' at first), first rank or '' for a search, number of names to
--   read, '1' for newest first, prefix; contains and task, each also escaped as in JSON
-- Returns {now, rows, processes, cursor or '' at the end, names in the index}.
local cursor, rank, size, newest, prefix, contains, quoted, task, task_quoted =
  unpack(ARGV, 3 + facts)
local index = KEYS[1]
size, newest = tonumber(size), newest == '1'
if cursor == '' and rank ~= '' and call('ZCARD', index) <= 1000 then
  for _, name in ipairs(call('ZRANGE', index, 0, -1)) do
    local l = read('HMGET', locks .. name, 'owner', 'until', 'kind')
    if l and not is_held(name, unpack(l)) then call('ZREM', index, name) end
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
-- Read before names are removed, and only for the last one, because formatting scores is slow.
cursor = size > 0 and #names == size and call('ZSCORE', index, names[size]) or ''
local function metadata_with(name, text)
  local meta = read('HGET', locks .. name, 'meta') or ''
  -- Searching the whole text first is faster than decoding it.
  if not string.find(meta, text, 1, true) then return {} end
  local is_json, metadata = pcall(cjson.decode, meta)
  return is_json and type(metadata) == 'table' and metadata or {}
end
local function is_in_metadata(name)
  local metadata = metadata_with(name, quoted)
  for _, key in ipairs({SEARCHED}) do
    local fact = metadata[key]
    if type(fact) == 'string' and string.find(fact, contains, 1, true) then return true end
  end
  return false
end
local function is_of_task(name)
  local fact = metadata_with(name, task_quoted).task_name
  return type(fact) == 'string' and string.sub(fact, 1, #task) == task
end
local all = prefix == '' and contains == '' and task == ''
for _, name in ipairs(names) do
  if all or string.sub(name, 1, #prefix) == prefix and
    (contains == '' or string.find(name, contains, 1, true) or is_in_metadata(name)) and
    (task == '' or is_of_task(name)) then
    collect(name)
  end
end
return answer(cursor, call('ZCARD', index))
""".replace("SEARCHED", str(SEARCHED)[1:-1])
)


Ask: TypeAlias = Callable[..., Any]
"""Runs a script with keys, arguments and perhaps a lock's name, within the command timeout."""


class RedisListing:
    """The methods are those of ``BaseLockBackend``."""

    def __init__(self, alias: str, keys: Keys, ask: Ask) -> None:
        self.alias, self._keys, self._ask = alias, keys, ask

    def get(self, name: str) -> LeaseInfo | None:
        rows = self._rows([name], Reader(self.alias), name)
        return rows[0].info() if rows else None

    def get_many(self, names: Sequence[str]) -> dict[str, LeaseInfo]:
        reader, found = Reader(self.alias), dict[str, LeaseInfo]()
        for start in range(0, len(names), ROWS_PER_CALL):
            rows = self._rows(names[start : start + ROWS_PER_CALL], reader)
            found |= {row.exact_name: row.info() for row in rows}
        return found

    def page(self, query: LeaseQuery, *, offset: int, limit: int | None) -> LeasePage:
        # All names here have the same alias.
        sort = [key for key in query.sort if key.removeprefix("-") != "alias"]
        newest_first = sort[:1] in (["age"], ["-token"])
        if newest_first or sort[:1] in (["-age"], ["token"]):
            sort = []
        if sort or replace(query, sort=()) != LeaseQuery():
            return self._selected(query, sort, newest_first, offset, limit)
        return self._by_rank(newest_first, offset, limit)

    # -- the ways to a page ------------------------------------------------------------

    def _by_rank(self, newest_first: bool, offset: int, limit: int | None) -> LeasePage:
        """In the order of the index, where the server finds a rank without counting."""
        reader, cursor = Reader(self.alias), ""
        # A name that is released and acquired again between two calls is found twice.
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
        """Read all names, and keep only those up to the end of the page."""
        reader = Reader(self.alias)
        # The server filters by names and metadata.
        rest = replace(query, prefix="", contains="", task="", sort=())
        is_wanted = None if rest == LeaseQuery() else rest.matches
        selection = _Selection(sort, math.inf if limit is None else offset + limit)
        facts = _facts_for(query, sort)

        cursor, more = "", True
        while more:
            walk = self._walk(facts, cursor, query, newest_first, size=NAMES_PER_CALL)
            *answer, cursor_, _ = self._ask(*walk)
            cursor = text(cursor_)
            more = bool(cursor)
            rows = reader.rows(facts, *answer)
            if is_wanted:
                rows = [row for row in rows if is_wanted(cast(LeaseInfo, row))]
            selection.add(rows)
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
    ) -> tuple[Script, list[str], list[str | int]]:
        order, first = "1" if newest_first else "0", "" if rank is None else rank
        sought = (part for text in (query.contains, query.task) for part in (text, _quoted(text)))
        args = [*self._collecting(facts), cursor, first, size, order, query.prefix, *sought]
        return WALK, [self._keys.index], args

    def _rows(self, names: Sequence[str], reader: Reader, name: str = "") -> list[Row]:
        """Rows with all facts, of those names that are held."""
        keys, args = [self._keys.index], [*self._collecting(ALL_FACTS), *names]
        return reader.rows(ALL_FACTS, *self._ask(ROWS, keys, args, name=name))

    def _collecting(self, facts: Sequence[str]) -> list[str | int]:
        return [self._keys.base, len(facts), *facts]


def _facts_for(query: LeaseQuery, sort: Sequence[str]) -> list[str]:
    keys = [key.removeprefix("-") for key in sort]
    keys += ["holder_state"] if query.holder_state else []
    keys += ["holder"] if query.host else []
    keys += ["age"] if query.older_than else []
    # In reverse, so that computed facts, which begin with ``@``, come last.
    return sorted({fact for key in keys for fact in FACTS[key]}, reverse=True)


def _quoted(text: str) -> str:
    return json.dumps(text)[1:-1]


class _Selection:
    """Keeps the first ``size`` leases in an order out of all that are added, and not many more.

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
        # One entry for each lease: its sort keys, and its name last.
        columns = [list(map(key, cast("Sequence[LeaseInfo]", rows))) for key in self._keys]
        self._best += zip(*columns, [row.exact_name for row in rows], strict=True)
        if len(self._best) > 2 * self._size + NAMES_PER_CALL:
            self._settle()

    def names(self) -> list[str]:
        self._settle()
        # A name that was released and acquired again in between was found twice.
        return list(dict.fromkeys(best[-1] for best in self._best))

    def _settle(self) -> None:
        for column, falling in reversed(list(enumerate(self._falling))):
            self._best.sort(key=itemgetter(column), reverse=falling)
        if self._size < len(self._best):
            del self._best[int(self._size) :]
