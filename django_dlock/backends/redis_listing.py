"""What a Redis holds now, for operators: pages, searches and counts over the index of names."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from ..lease import Kind, LeaseInfo
from ..process import ProcessIdentity, death_proof
from .base import LeaseInfos
from .describe import holder_state, json_object, process_from_json
from .redis_commands import Keys, text
from .redis_scripts import COMMON, Script

__all__ = ["RedisListing"]

ROWS_PER_CALL = 200

# A row for ``LeaseInfo``, nothing for a name that is free. A key without a TTL is shown although
# its lease is over: it would stay for ever.
_ROW = """
local function row(lock, waiters, beats, name)
  local l = redis.call('HMGET', lock, 'owner', 'until', 'kind', 'token', 'at', 'n', 'proc', 'meta',
    'pid', 'ttl')
  local owner, till = l[1], l[2]
  local damaged = owner and (not till or redis.call('PTTL', lock) == -1)
  if not lives(owner, till) and not damaged then return nil end
  local waiting = redis.call('ZCOUNT', waiters, text(now), '+inf')
  local beat = l[9] and redis.call('ZSCORE', beats, l[9]) or '0'
  local heard = math.max(tonumber(beat or 0), tonumber(l[5] or 0),
    tonumber(till or 0) - tonumber(l[10] or 0))
  return {name, owner, l[3] or 'held', l[4] or '0', l[5] or text(now), l[6] or '0', l[7] or '',
    l[8] or '', damaged and '' or text(till - now), waiting, text(now - heard),
    tonumber(beat or 0) < 0 and 1 or 0, text(now)}
end
"""

GET = Script(
    COMMON
    + _ROW
    + """
-- KEYS: lock, waiters, beats
-- ARGV: name
-- Returns a row or nothing.
return row(KEYS[1], KEYS[2], KEYS[3], ARGV[1]) or false
"""
)

# Goes through the index, first from a rank on, then by token, which stays right while names come
# and go. Ends that were not seen are taken out on the way; a small index is cleaned as a whole
# before, so that ranks and counts are exact.
_SCAN = """
local function stale(lock)
  local l = redis.call('HMGET', lock, 'owner', 'until')
  return not lives(l[1], l[2]) and (not l[1] or redis.call('PTTL', lock) ~= -1)
end
local function clean(index, locks)
  if redis.call('ZCARD', index) > 1000 then return end
  for _, name in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    if stale(locks .. name) then redis.call('ZREM', index, name) end
  end
end
local function stride(index, cursor, rank, size, newest)
  if cursor == '' then
    local range = newest and 'ZREVRANGE' or 'ZRANGE'
    return redis.call(range, index, rank, rank + size - 1, 'WITHSCORES')
  elseif newest then
    return redis.call('ZREVRANGEBYSCORE', index, '(' .. cursor, '-inf', 'WITHSCORES',
      'LIMIT', 0, size)
  end
  return redis.call('ZRANGEBYSCORE', index, '(' .. cursor, '+inf', 'WITHSCORES', 'LIMIT', 0, size)
end
local function matches(name, prefix, contains)
  return string.sub(name, 1, #prefix) == prefix and
    (contains == '' or string.find(name, contains, 1, true))
end
"""

LIST = Script(
    COMMON
    + _ROW
    + _SCAN
    + """
-- KEYS: index, beats
-- ARGV: prefix of lock keys, prefix of waiter keys, cursor ('' at first), first rank,
--   matches to skip, rows wanted, '1' for newest first, prefix, contains
-- Returns {cursor or '' at the end, matches still to skip, row...}.
local cursor, skip, want = ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[6])
if cursor == '' then clean(KEYS[1], ARGV[1]) end
-- A search reads names in great strides, a page no more than it shows.
local size = (ARGV[8] ~= '' or ARGV[9] ~= '') and 5000 or want
local names = stride(KEYS[1], cursor, tonumber(ARGV[4]), size, ARGV[7] == '1')
local rows = {'', 0}
for i = 1, #names, 2 do
  local name = names[i]
  if matches(name, ARGV[8], ARGV[9]) then
    local found = row(ARGV[1] .. name, ARGV[2] .. name, KEYS[2], name)
    if not found then
      redis.call('ZREM', KEYS[1], name)
    elseif skip > 0 then
      skip = skip - 1
    else
      rows[#rows + 1] = found
    end
  end
  cursor = names[i + 1]
  if #rows - 2 == want then break end
end
if #rows - 2 == want or #names == 2 * size then rows[1] = cursor end
rows[2] = skip
return rows
"""
)

COUNT = Script(
    COMMON
    + _SCAN
    + """
-- KEYS: index
-- ARGV: prefix of lock keys, cursor ('' at first), prefix, contains
-- Returns {cursor or '' at the end, matches}.
local cursor, found = ARGV[2], 0
if cursor == '' then clean(KEYS[1], ARGV[1]) end
if ARGV[3] == '' and ARGV[4] == '' then return {'', redis.call('ZCARD', KEYS[1])} end
local names = stride(KEYS[1], cursor, 0, 5000, false)
for i = 1, #names, 2 do
  local name = names[i]
  if matches(name, ARGV[3], ARGV[4]) then
    if stale(ARGV[1] .. name) then
      redis.call('ZREM', KEYS[1], name)
    else
      found = found + 1
    end
  end
  cursor = names[i + 1]
end
return {#names == 10000 and cursor or '', found}
"""
)


class Ask(Protocol):
    """Runs a script within the command timeout."""

    def __call__(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int], *, name: str = ""
    ) -> Any: ...


class RedisListing:
    """See ``BaseLockBackend`` for the three questions."""

    def __init__(self, alias: str, keys: Keys, ask: Ask) -> None:
        self.alias, self._keys, self._ask = alias, keys, ask

    def get(self, name: str) -> LeaseInfo | None:
        keys = [self._keys.locks + name, self._keys.waiters + name, self._keys.beats]
        row = self._ask(GET, keys, [name], name=name)
        return self._info(row) if row else None

    def list(
        self,
        *,
        prefix: str = "",
        contains: str = "",
        newest_first: bool = False,
        offset: int = 0,
        limit: int | None = None,
    ) -> LeaseInfos:
        searches = bool(prefix or contains)
        infos: LeaseInfos = []
        # One process may hold thousands of these leases. Remembered for this listing only: a
        # process may die at any moment.
        read, proof = functools.cache(process_from_json), functools.cache(death_proof)
        # Without a search the offset is a rank, which the server finds without counting.
        cursor, rank, skip = "", 0 if searches else offset, offset if searches else 0
        keys = self._keys
        while (wanted := ROWS_PER_CALL if limit is None else limit - len(infos)) > 0:
            wanted = min(wanted, ROWS_PER_CALL)
            order = "1" if newest_first else "0"
            answer = self._ask(
                LIST,
                [keys.index, keys.beats],
                [
                    keys.locks,
                    keys.waiters,
                    cursor,
                    rank,
                    skip,
                    wanted,
                    order,
                    prefix,
                    contains,
                ],
            )
            cursor, skip = text(answer[0]), int(answer[1])
            infos += (self._info(row, read, proof) for row in answer[2:])
            if not cursor:
                break
        return infos

    def count(self, *, prefix: str = "", contains: str = "") -> int:
        cursor, found = "", 0
        while True:
            answer = self._ask(
                COUNT, [self._keys.index], [self._keys.locks, cursor, prefix, contains]
            )
            cursor = text(answer[0])
            found += int(answer[1])
            if not cursor:
                return found

    def _info(
        self,
        row: Sequence[Any],
        read: Callable[[str], ProcessIdentity | None] = process_from_json,
        proof: Callable[..., object] = death_proof,
    ) -> LeaseInfo:
        name, owner, kind, token, at, renewals, process_json, metadata, ttl = map(text, row[:9])
        waiting, unheard, goodbye, now = (int(field) for field in row[9:])
        process = read(process_json)
        return LeaseInfo(
            name=name,
            alias=self.alias,
            kind=cast(Kind, kind),
            owner=owner,
            token=int(token),
            acquired_at=dt.datetime.fromtimestamp(int(at) / 1000, tz=dt.timezone.utc),
            age=(now - int(at)) / 1000,
            ttl=int(ttl) / 1000 if ttl else None,
            renewals=int(renewals),
            waiting=waiting,
            process=process,
            holder_state=holder_state(
                cast(Kind, kind),
                process,
                unheard=unheard / 1000,
                goodbye=bool(goodbye),
                proof=proof,
            ),
            metadata=json_object(metadata),
            unheard=unheard / 1000,
        )
