"""The Lua that the Redis backend runs; each script is one atomic step.

Keys of a bucket share the tag ``{prefix:bucket}``, so that all keys of one lock lie in one slot:

* ``…:l:<name>`` hash of one name. ``owner`` until a release or a break; ``until`` and ``at`` in
  milliseconds and ``token`` in microseconds on the server's clock; ``ttl`` in milliseconds;
  ``kind``; ``n`` renewals; ``pid`` and ``proc`` the holder's process, as id and as JSON; ``meta``
  JSON; ``last`` and ``how`` the owner before and how its lease ended. The key outlives the lease
  by a TTL, at least a minute, for the memory of its end.
* ``…:q:<name>`` sorted set of waiters by when they are forgotten; ``…:w:<name>`` the list on
  which they block.
* ``…:index`` sorted set of the names that are held, by token, so in order of their grant.
* ``…:beats`` sorted set of processes by when they were last heard of; negative after a goodbye.
* ``…:clock`` the highest token given out; ``…:u:<owner>`` an attempt that was taken back.

Numbers are formatted by hand: Lua's ``tostring`` keeps 14 digits, a token has 16.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

__all__ = [
    "ACQUIRE",
    "BREAK",
    "COMMON",
    "FATES",
    "GOODBYE",
    "LAST_END",
    "LOCKED",
    "RELEASE",
    "RENEW",
    "UNDO",
    "Script",
]


@dataclass(frozen=True)
class Script:
    """Lua source and the digest by which the server knows it."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


# ``now`` in ms, and whether a hash's lease lives. One without an end counts as living: somebody
# tampered with it, and only an operator may say that it is over.
COMMON = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function text(number) return string.format('%.0f', number) end
local function lives(owner, till) return owner and (not till or tonumber(till) > now) end
local function memory(ttl) return math.max(tonumber(ttl or 0), 60000) end
local function end_of(kind) return kind == 'cooling' and 'released' or 'expired' end
"""

# Wakes the waiter that has waited longest. One token at the most, kept for a moment for one who
# is counted already but does not block yet.
_WAKE = """
local function wake(waiters, list)
  if redis.call('ZCARD', waiters) == 0 then return end
  redis.call('ZREMRANGEBYSCORE', waiters, '-inf', text(now))
  if redis.call('ZCARD', waiters) == 0 then return end
  redis.call('DEL', list)
  redis.call('RPUSH', list, '1')
  redis.call('PEXPIRE', list, 5000)
end
local function free(lock, index, name, owner, how, ttl)
  redis.call('HDEL', lock, 'owner', 'until')
  redis.call('HSET', lock, 'last', owner, 'how', how)
  redis.call('PEXPIRE', lock, text(memory(ttl)))
  redis.call('ZREM', index, name)
end
"""

ACQUIRE = Script(
    COMMON
    + """
-- KEYS: lock, waiters, index, clock, undone
-- ARGV: name, owner, ttl ms, kind, process id, process JSON, metadata, '1' if it will wait,
--   owner that may be replaced or ''
-- Returns {token} or {'', owner, kind, remaining ms, process JSON, now ms}.
local name, me, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'token', 'last', 'how', 'proc',
  'ttl')
local owner, till, kind, token, last, how, proc = unpack(l, 1, 7)
local living = lives(owner, till)
if owner and not living then last, how = owner, end_of(kind) end
local undone = redis.call('EXISTS', KEYS[5]) == 1

if living and owner == me and kind ~= 'cooling' and not undone then
  local new = math.max(tonumber(till or 0), now + ttl)
  redis.call('HSET', KEYS[1], 'until', text(new))
  redis.call('PEXPIRE', KEYS[1], text(new - now + memory(ttl)))
  redis.call('ZREM', KEYS[2], me)
  return {token}
end
if living and owner == ARGV[9] and kind ~= 'cooling' and not undone then
  living, last, how = false, owner, 'released'
end
-- The late packet of an attempt whose lease was given back or broken since must not revive it.
local over = not living and last == me and how ~= 'expired'
if living or undone or over then
  local remaining = 0
  if living then
    remaining = till and tonumber(till) - now or 10000
    -- An end beyond the lease's own TTL comes of a clock that has stepped back: nobody shall wait
    -- for as long as the step.
    local longest = tonumber(l[8])
    if till and longest and kind ~= 'cooling' and remaining > longest then
      remaining = longest
      redis.call('HSET', KEYS[1], 'until', text(now + longest))
      redis.call('PEXPIRE', KEYS[1], text(longest + memory(longest)))
    end
  end
  if ARGV[8] == '1' and living and not undone then
    local forget = math.min(remaining, 10000) + 5000
    redis.call('ZADD', KEYS[2], text(now + forget), me)
    redis.call('PEXPIRE', KEYS[2], text(forget + 60000))
  else
    redis.call('ZREM', KEYS[2], me)
  end
  if not living then return {'', '', 'held', '0', '', text(now)} end
  return {'', owner, kind or 'held', text(remaining), proc or '', text(now)}
end

-- Above all that the bucket has given out, so that tokens rise when the clock steps back; above
-- the clock, so that they rise when the server has lost its data.
local highest = math.max(tonumber(token or 0), tonumber(redis.call('GET', KEYS[4]) or 0))
local new = text(math.max(highest + 1, time[1] * 1000000 + time[2]))
redis.call('SET', KEYS[4], new)
redis.call('HSET', KEYS[1], 'owner', me, 'until', text(now + ttl), 'kind', ARGV[4],
  'token', new, 'ttl', ARGV[3], 'at', text(now), 'n', '0', 'pid', ARGV[5], 'proc', ARGV[6],
  'meta', ARGV[7])
if last then redis.call('HSET', KEYS[1], 'last', last, 'how', how) end
redis.call('PEXPIRE', KEYS[1], text(ttl + memory(ttl)))
redis.call('ZADD', KEYS[3], new, name)
redis.call('ZREM', KEYS[2], me)
return {new}
"""
)

RELEASE = Script(
    COMMON
    + _WAKE
    + """
-- KEYS: lock, waiters, index, wake list
-- ARGV: name, owner, min_hold ms
-- Returns the fate.
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'ttl', 'at', 'last', 'how')
local owner, till, kind, ttl, at, last, how = unpack(l, 1, 7)
if owner ~= ARGV[2] then return last == ARGV[2] and how or 'refused' end
if not lives(owner, till) or kind == 'cooling' then return end_of(kind) end
-- The clock may have stepped back since the grant: then from now, or the name would stay taken
-- for as long as the step.
local cool = math.min(tonumber(at or 0), now) + tonumber(ARGV[3])
if cool > now then
  -- In this order for a server out of memory, see RENEW.
  redis.call('PEXPIRE', KEYS[1], text(cool - now + memory(ttl)))
  redis.call('HSET', KEYS[1], 'kind', 'cooling', 'until', text(cool))
else
  free(KEYS[1], KEYS[3], ARGV[1], owner, 'released', ttl)
end
-- While it cools, too: waiters sleep until an end that no longer holds.
wake(KEYS[2], KEYS[4])
return 'released'
"""
)

UNDO = Script(
    COMMON
    + _WAKE
    + """
-- KEYS: lock, waiters, index, wake list, undone
-- ARGV: name, owner, ms for which the attempt cannot be granted any more
-- In this order for a server out of memory, see RENEW.
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('SET', KEYS[5], '1', 'PX', ARGV[3])
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'ttl')
local owner, till, kind, ttl = unpack(l, 1, 4)
local living = lives(owner, till)
if living and owner == ARGV[2] and kind ~= 'cooling' then
  free(KEYS[1], KEYS[3], ARGV[1], owner, 'released', ttl)
  living = false
end
-- It may have been woken and never come to try: the next one is.
if not living then wake(KEYS[2], KEYS[4]) end
"""
)

BREAK = Script(
    COMMON
    + _WAKE
    + """
-- KEYS: lock, waiters, index, wake list
-- ARGV: name, owner
-- Returns 1, or 0 where the owner does not have it.
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'ttl')
local owner, till, ttl = unpack(l, 1, 3)
if owner ~= ARGV[2] then return 0 end
if not lives(owner, till) and redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
free(KEYS[1], KEYS[3], ARGV[1], owner, 'broken', ttl)
wake(KEYS[2], KEYS[4])
return 1
"""
)

FATES = {
    "n": "renewed",
    "r": "released",
    "e": "expired",
    "b": "broken",
    "f": "refused",
}
"""What the letters of ``RENEW``'s answer mean."""

RENEW = Script(
    COMMON
    + """
-- KEYS: beats, index, lock...
-- ARGV: process id, prefix of lock keys, then owner and ttl ms of each lock
-- Returns one letter per lock, see FATES.
local day = 86400000
-- First, because a server out of memory refuses ``ZADD`` and ``HSET`` until the script has
-- written something that takes no memory: it grants nothing more, but what is held is renewed.
redis.call('ZREMRANGEBYSCORE', KEYS[1], text(day - now), text(now - day))
redis.call('ZADD', KEYS[1], text(now), ARGV[1])
local letters = {released = 'r', expired = 'e', broken = 'b'}
local fates = {}
for i = 3, #KEYS do
  local me, ttl = ARGV[2 * i - 3], tonumber(ARGV[2 * i - 2])
  local l = redis.call('HMGET', KEYS[i], 'owner', 'until', 'kind', 'last', 'how', 'n', 'ttl')
  local owner, till, kind, last, how, n, before = unpack(l, 1, 7)
  if owner ~= me then
    fates[#fates + 1] = last == me and letters[how] or 'f'
  elseif kind == 'cooling' or not lives(owner, till) then
    fates[#fates + 1] = letters[end_of(kind)]
  else
    -- One that was sent earlier, for a shorter time, may arrive later: it takes nothing away. An
    -- end beyond the TTL comes of a clock that has stepped back, and is put right.
    local left = till and tonumber(till) - now or 0
    if left > ttl and left <= tonumber(before or 0) then ttl = left end
    redis.call('HSET', KEYS[i], 'until', text(now + ttl), 'ttl', text(ttl),
      'n', text(tonumber(n or 0) + 1))
    redis.call('PEXPIRE', KEYS[i], text(ttl + memory(ttl)))
    fates[#fates + 1] = 'n'
  end
end
-- Names whose lease ended unseen leave the index little by little.
local some = redis.call('ZRANDMEMBER', KEYS[2], 3)
for _, name in ipairs(some) do
  local l = redis.call('HMGET', ARGV[2] .. name, 'owner', 'until')
  if not lives(l[1], l[2]) and redis.call('PTTL', ARGV[2] .. name) ~= -1 then
    redis.call('ZREM', KEYS[2], name)
  end
end
return table.concat(fates)
"""
)

LOCKED = Script(
    COMMON
    + """
-- KEYS: lock
local l = redis.call('HMGET', KEYS[1], 'owner', 'until')
return lives(l[1], l[2]) and 1 or 0
"""
)

LAST_END = Script(
    COMMON
    + """
-- KEYS: lock
-- Returns {owner, fate} or nothing.
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'last', 'how')
local owner, till, kind, last, how = unpack(l, 1, 5)
if lives(owner, till) then return false end
if owner then return {owner, end_of(kind)} end
return last and {last, how}
"""
)

GOODBYE = Script(
    COMMON
    + """
-- KEYS: beats
-- ARGV: process id
redis.call('ZADD', KEYS[1], text(-now), ARGV[1])
"""
)
