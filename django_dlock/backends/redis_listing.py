"""What a Redis holds now, for operators: pages, searches and counts over the index of names.

A page in order of the grants reads the rows that it shows. For any other order or filter the
whole index is gone through, of each lease no more than the facts asked about; then the rows of
the page are read. A script looks at no more than ``NAMES_PER_CALL`` names, and others are served
between two of them.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Protocol, cast

from ..lease import SORT_KEYS, HolderState, Kind, LeaseInfo, LeasePage, LeaseQuery
from ..process import ProcessIdentity, death_proof
from .base import LeaseInfos
from .describe import holder_state, json_object, process_from_json
from .redis_commands import Keys, text
from .redis_scripts import COMMON, Script

__all__ = ["RedisListing"]

NAMES_PER_CALL = 1000
ROWS_PER_CALL = 500

# Facts of a lease: fields of its hash, and those with an ``@``, which no hash has, worked out. A
# key without a TTL is shown although its lease is over: it would stay for ever. Answers are JSON,
# which both sides write and read much faster than a reply of many parts.
_LOOK = """
-- ARGV: prefix of lock keys, prefix of waiter keys, how many facts are wanted, fact...
local locks, waiters, facts, place = ARGV[1], ARGV[2], {}, {}
for i = 1, tonumber(ARGV[3]) do
  facts[i] = ARGV[3 + i]
  place[facts[i]] = i + 2
end
local procs, number_of, beat_of = {}, {}, {}
local worked_out = {
  ['@endless'] = function(name)
    return redis.call('PTTL', locks .. name) == -1
  end,
  ['@waiting'] = function(name)
    return redis.call('ZCARD', waiters .. name)
  end,
  ['@beat'] = function(name, l)
    local process = l[place.pid]
    if process and not beat_of[process] then
      beat_of[process] = redis.call('ZSCORE', BEATS, process) or '0'
    end
    return process and beat_of[process]
  end,
  -- Said once, however many leases the process holds.
  proc = function(name, l)
    local process = l[place.proc]
    if process and not number_of[process] then
      procs[#procs + 1] = process
      number_of[process] = #procs
    end
    return process and number_of[process]
  end,
}
-- {name, until, fact...}, or nothing for a name that is free.
local function look(name)
  local l = redis.call('HMGET', locks .. name, 'owner', 'until', unpack(facts))
  if not lives(l[1], tonumber(l[2])) and
    not (l[1] and redis.call('PTTL', locks .. name) == -1) then return nil end
  l[1] = name
  for i, fact in ipairs(facts) do
    if worked_out[fact] then l[i + 2] = worked_out[fact](name, l) end
  end
  return l
end
"""

ROWS = Script(
    COMMON
    + "local BEATS = KEYS[1]\n"
    + _LOOK
    + """
-- KEYS: beats, index
-- ARGV: and name...
-- Returns {now, rows of those that live, processes}.
local rows = {}
for i = 4 + #facts, #ARGV do
  local row = look(ARGV[i])
  if row then
    rows[#rows + 1] = row
  else
    redis.call('ZREM', KEYS[2], ARGV[i])
  end
end
return {text(now), cjson.encode(rows), cjson.encode(procs)}
"""
)

# First from a rank on, then by token, which stays right while names come and go. Ends that were
# not seen are taken out on the way; a small index is cleaned as a whole before, so that ranks and
# counts are exact.
WALK = Script(
    COMMON
    + "local BEATS = KEYS[1]\n"
    + _LOOK
    + """
-- KEYS: beats, index
-- ARGV: and cursor ('' at first), first rank, names to look at, '1' for newest first, prefix,
--   contains
-- Returns {now, rows, processes, cursor or '' at the end, names in the index}.
local cursor, rank, size, newest, prefix, contains = unpack(ARGV, 4 + #facts)
local index = KEYS[2]
rank, size, newest = tonumber(rank), tonumber(size), newest == '1'
local function small() return redis.call('ZCARD', index) <= 1000 end
if cursor == '' and small() then
  for _, name in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    if not look(name) then redis.call('ZREM', index, name) end
  end
end
local names = {}
if size == 0 then
  cursor = ''
elseif cursor == '' then
  names = redis.call(newest and 'ZREVRANGE' or 'ZRANGE', index, rank, rank + size - 1,
    'WITHSCORES')
elseif newest then
  names = redis.call('ZREVRANGEBYSCORE', index, '(' .. cursor, '-inf', 'WITHSCORES',
    'LIMIT', 0, size)
else
  names = redis.call('ZRANGEBYSCORE', index, '(' .. cursor, '+inf', 'WITHSCORES',
    'LIMIT', 0, size)
end
local rows = {}
for i = 1, #names, 2 do
  local name = names[i]
  if string.sub(name, 1, #prefix) == prefix and
    (contains == '' or string.find(name, contains, 1, true)) then
    local row = look(name)
    if row then
      rows[#rows + 1] = row
    else
      redis.call('ZREM', index, name)
    end
  end
end
cursor = size > 0 and #names == 2 * size and names[#names] or ''
return {text(now), cjson.encode(rows), cjson.encode(procs), cursor, redis.call('ZCARD', index)}
"""
)

_STATE = ("kind", "proc", "pid", "at", "ttl", "@beat")
_FACTS = {
    "name": (),
    "alias": (),
    "kind": ("kind",),
    "holder": ("proc",),
    "holder_state": _STATE,
    "age": ("at", "token"),
    "ttl": ("@endless",),
    "renewals": ("n",),
    "token": ("token",),
    "waiting": ("@waiting",),
}
"""What has to be known of a lease to sort by a key of ``SORT_KEYS``."""
_ROW = (*_STATE, "owner", "token", "n", "meta", "@endless", "@waiting")


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


class RedisListing:
    """See ``BaseLockBackend`` for the questions."""

    def __init__(self, alias: str, keys: Keys, ask: Ask) -> None:
        self.alias, self._keys, self._ask = alias, keys, ask

    def get(self, name: str) -> LeaseInfo | None:
        rows = self._rows([name.encode()], _Reader(self.alias), name)
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
        reader, cursor = _Reader(self.alias), ""
        infos: LeaseInfos = []
        while True:
            wanted = ROWS_PER_CALL if limit is None else limit - len(infos)
            size = min(wanted, ROWS_PER_CALL)
            rows, cursor, total = self._walk(
                reader, _ROW, cursor, LeaseQuery(), newest_first, rank=offset, size=size
            )
            infos += [row.info() for row in rows]
            if not cursor or len(infos) == limit:
                return LeasePage(infos, total)

    def _selected(
        self,
        query: LeaseQuery,
        sort: Sequence[str],
        newest_first: bool,
        offset: int,
        limit: int | None,
    ) -> LeasePage:
        """Out of all names, of which only those up to the end of the page are kept."""
        reader, total, cursor = _Reader(self.alias), 0, ""
        end = math.inf if limit is None else offset + limit
        facts = _facts_for(query, sort)
        # What a lease is sorted by, and its name last.
        best: list[tuple[Any, ...]] = []
        while True:
            rows, cursor, _ = self._walk(
                reader, facts, cursor, query, newest_first, size=NAMES_PER_CALL
            )
            found = [row for row in rows if _passes(row, query)]
            total += len(found)
            for row in found:
                info = cast(LeaseInfo, row)
                best.append((*(SORT_KEYS[key.lstrip("-")](info) for key in sort), row.exact_name))
            # Memory for the pages up to this one, not for all that there is.
            if not cursor or len(best) > 2 * end + NAMES_PER_CALL:
                for place in reversed(range(len(sort))):
                    best.sort(key=itemgetter(place), reverse=sort[place].startswith("-"))
                if end < len(best):
                    del best[int(end) :]
            if not cursor:
                break
        names = [found[-1] for found in best[offset:]]
        infos: LeaseInfos = []
        for start in range(0, len(names), ROWS_PER_CALL):
            chunk = self._rows(names[start : start + ROWS_PER_CALL], reader)
            infos += [row.info() for row in chunk]
        return LeasePage(infos, total)

    # -- scripts -----------------------------------------------------------------------

    def _walk(
        self,
        reader: _Reader,
        facts: Sequence[str],
        cursor: str,
        query: LeaseQuery,
        newest_first: bool,
        *,
        size: int,
        rank: int = 0,
    ) -> tuple[list[_Row], str, int]:
        """Leases with these facts, where to go on (empty at the end), length of the index."""
        order = "1" if newest_first else "0"
        answer = self._ask(
            WALK,
            [self._keys.beats, self._keys.index],
            [*self._looking(facts), cursor, rank, size, order, query.prefix, query.contains],
        )
        return list(reader.rows(facts, *answer[:3])), text(answer[3]), int(answer[4])

    def _rows(self, names: Sequence[bytes], reader: _Reader, name: str = "") -> list[_Row]:
        """All facts of those names that are not free."""
        keys, args = [self._keys.beats, self._keys.index], [*self._looking(_ROW), *names]
        return list(reader.rows(_ROW, *self._ask(ROWS, keys, args, name=name)))

    def _looking(self, facts: Sequence[str]) -> list[str | int | bytes]:
        return [self._keys.locks, self._keys.waiters, len(facts), *facts]


def _facts_for(query: LeaseQuery, sort: Sequence[str]) -> list[str]:
    keys = {key.removeprefix("-") for key in sort}
    keys |= {"kind"} if query.kind else set()
    keys |= {"holder_state"} if query.holder_state else set()
    return sorted({fact for key in keys for fact in _FACTS[key]})


def _passes(row: _Row, query: LeaseQuery) -> bool:
    if query.kind and row.kind != query.kind:
        return False
    return not query.holder_state or row.holder_state == query.holder_state


class _Reader:
    """Makes rows of the scripts' answers, for one listing.

    One process may hold thousands of leases; it is looked at once. The next listing looks again,
    since a process may die at any moment.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.process = functools.cache(process_from_json)
        self.proof = functools.cache(death_proof)

    def rows(self, facts: Sequence[str], now: Any, rows: bytes, processes: bytes) -> Iterator[_Row]:
        moment, known = int(now), ["", *_json(processes)]
        fields = ("name", "until", *facts)
        for row in _json(rows):
            said = dict(zip(fields, row, strict=True))
            said["proc"] = known[said.get("proc") or 0]
            yield _Row(self, moment, said)


def _json(answer: bytes) -> Iterable[Any]:
    # Bytes that are no text stay what they are, so that the name can be asked about. An empty
    # list comes as an empty object: Lua has one thing for both.
    return cast("Iterable[Any]", json.loads(answer.decode("utf-8", "surrogateescape")))


def _number(field: Any) -> int:
    # A stranger's damage to one entry must not keep the operator from seeing the others.
    try:
        return int(field)
    except (TypeError, ValueError):
        return 0


class _Row:
    """As a ``LeaseInfo``, as far as the facts go that were asked for."""

    __slots__ = ("_now", "_reader", "_said", "alias")

    def __init__(self, reader: _Reader, now: int, said: dict[str, Any]) -> None:
        self._reader, self._now, self._said, self.alias = reader, now, said, reader.alias

    @property
    def exact_name(self) -> bytes:
        return self._bytes("name")

    @property
    def name(self) -> str:
        return text(self._bytes("name"))

    @property
    def kind(self) -> Kind:
        return cast(Kind, text(self._bytes("kind")) or "held")

    @property
    def token(self) -> int:
        return _number(self._said["token"])

    @property
    def acquired_at(self) -> dt.datetime:
        seconds = (_number(self._said["at"]) or self._now) / 1000
        return dt.datetime.fromtimestamp(seconds, tz=dt.timezone.utc)

    @property
    def ttl(self) -> float | None:
        until = _number(self._said["until"])
        return (until - self._now) / 1000 if until and not self._said["@endless"] else None

    @property
    def renewals(self) -> int:
        return _number(self._said["n"])

    @property
    def waiting(self) -> int:
        return _number(self._said["@waiting"])

    @property
    def process(self) -> ProcessIdentity | None:
        return self._reader.process(self._said["proc"])

    @property
    def unheard(self) -> float:
        said = self._said
        renewed = _number(said["until"]) - _number(said["ttl"])
        heard = max(_number(said["@beat"]), _number(said["at"]), renewed)
        return (self._now - heard) / 1000

    @property
    def holder_state(self) -> HolderState:
        return holder_state(
            self.kind,
            self.process,
            unheard=self.unheard,
            goodbye=_number(self._said["@beat"]) < 0,
            proof=self._reader.proof,
        )

    def info(self) -> LeaseInfo:
        acquired_at = self.acquired_at
        return LeaseInfo(
            name=self.name,
            alias=self.alias,
            kind=self.kind,
            owner=text(self._bytes("owner")),
            token=self.token,
            acquired_at=acquired_at,
            age=self._now / 1000 - acquired_at.timestamp(),
            ttl=self.ttl,
            renewals=self.renewals,
            waiting=self.waiting,
            process=self.process,
            holder_state=self.holder_state,
            metadata=json_object(text(self._bytes("meta"))),
            unheard=self.unheard,
        )

    def _bytes(self, fact: str) -> bytes:
        return str(self._said[fact] or "").encode("utf-8", "surrogateescape")
