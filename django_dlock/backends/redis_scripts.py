"""The scripts of the Redis backend, each one atomic step; ``redis_lua.py`` has what they keep."""

from __future__ import annotations

from .redis_lua import (
    COMMON,
    FREE,
    GRANT,
    HAND_OVER,
    LIVES,
    MEMORY_MS,
    NOW,
    NUMBERS,
    STAND_IN_LINE,
    WAITER_MS,
    Script,
)

__all__ = [
    "ACQUIRE",
    "BREAK",
    "FATES",
    "GOODBYE",
    "LAST_END",
    "LOCKED",
    "RELEASE",
    "RENEW",
    "UNDO",
]

ACQUIRE = Script(
    NOW
    + GRANT
    + f"""
-- KEYS: see above, then mark of an attempt that was taken back, what this one asks for
-- ARGV: name, owner, ttl ms, kind, process JSON, metadata, mailbox of one who will wait or '',
--   owner that may be replaced or '', ms until a key with this TTL goes
-- Returns the token, or lines of what is in the way: kind, remaining ms, now ms, token, process
-- JSON, owner. One text, for to read it takes a client as long as each part of a list.
local name, me, mailbox = ARGV[1], ARGV[2], ARGV[7]
local owner, kind, token, last, till, longest, proc = unpack(redis.call(
  'HMGET', KEYS[1], 'owner', 'kind', 'token', 'last', 'until', 'ttl', 'proc'), 1, 7)
local known = redis.call('EXISTS', KEYS[5], KEYS[6]) > 0
if not known then
  -- The usual cases, nobody has heard of this attempt. The first: nobody has the name.
  local over = kind == 'released' or kind == 'broken'
  if not owner or owner ~= me and over and not (last and string.find(last, me, 1, true)) then
    local new = above(token)
    if owner then
      grant(name, me, new, ARGV[3], ARGV[9], ARGV[4], ARGV[5], ARGV[6],
        'last', owner .. ':' .. kind)
    else
      grant(name, me, new, ARGV[3], ARGV[9], ARGV[4], ARGV[5], ARGV[6])
    end
    return tonumber(new)
  end
  -- The second: another has it, for less than the whole of its TTL, and this one will wait.
  if mailbox ~= '' and owner ~= me and owner ~= '' and owner ~= ARGV[8] and not over
    and kind ~= 'cooling' then
    local left = (tonumber(till) or 0) - now
    if left > 0 and left <= (tonumber(longest) or 0) and left < 1e12 then
{STAND_IN_LINE}
      return (kind or 'held') .. '\\n' .. string.format('%.0f', left) .. '\\n' .. moment .. '\\n'
        .. (token or '0') .. '\\n' .. (proc or '') .. '\\n' .. owner
    end
  end
end
"""
    + NUMBERS
    + LIVES
    + f"""
local ttl = tonumber(ARGV[3])
local past = redis.call('HGET', KEYS[1], 'past')
till, longest = whole(till), whole(longest)
local living = lives(owner, till, kind)
local undone = known and redis.call('EXISTS', KEYS[5]) == 1
if known then
  if mailbox == '' or not living or undone then redis.call('ZREM', KEYS[2], me) end
  redis.call('DEL', KEYS[6])
end

if living and owner == me and kind ~= 'cooling' and not undone then
  -- One that was handed over has less than it asked for.
  local new = math.max(till or 0, now + ttl)
  redis.call('HSET', KEYS[1], 'until', new, 'ttl', math.max(longest or 0, ttl))
  redis.call('PEXPIRE', KEYS[1], new - now + memory(ttl))
  return tonumber(token) or 0
end
if living and owner == ARGV[8] and kind ~= 'cooling' and not undone then
  living, kind = false, 'released'
end
-- The late packet of an attempt whose lease was given back or broken since must not revive it.
local over = not living and ended(owner == me and end_of(kind) or end_before(last, past, me))
if living or undone or over then
  if not living then return table.concat({{'held', '0', moment, token or '0', '', ''}}, '\\n') end
  local remaining = till and till - now or 10000
  -- An end beyond the lease's own TTL comes of a clock that has stepped back: nobody shall wait
  -- for as long as the step.
  if till and longest and longest > 0 and remaining > longest and kind ~= 'cooling' then
    remaining = longest
    redis.call('HSET', KEYS[1], 'until', now + longest)
    redis.call('PEXPIRE', KEYS[1], longest + memory(longest))
  end
  if mailbox ~= '' and not undone then
{STAND_IN_LINE}
  end
  return table.concat(
    {{kind or 'held', text(remaining), moment, token or '0', proc or '', owner}}, '\\n')
end

local new = above(token)
if owner and owner ~= me then
  grant(name, me, new, ttl, ARGV[9], ARGV[4], ARGV[5], ARGV[6],
    'last', owner .. ':' .. end_of(kind))
else
  grant(name, me, new, ttl, ARGV[9], ARGV[4], ARGV[5], ARGV[6])
end
return tonumber(new)
"""
)

# Nobody takes the name. Somebody may have taken the key's TTL away: nobody would see it any more.
_STAYS_FREE = f"""
if redis.call('PTTL', KEYS[1]) == -1 then redis.call('PEXPIRE', KEYS[1], {MEMORY_MS}) end
{FREE}
"""

RELEASE = Script(
    f"""
-- KEYS: see above
-- ARGV: name, owner, min_hold ms, prefix of what waiters ask for
-- Returns 1 where it is released now, else the fate.
local name, me, requests, how, told = ARGV[1], ARGV[2], ARGV[4], 'released', nil
local owner, kind, ttl, token, past, till = unpack(
  redis.call('HMGET', KEYS[1], 'owner', 'kind', 'ttl', 'token', 'past', 'until'), 1, 6)
local usual = ARGV[3] == '0' and owner == me
  and kind ~= 'cooling' and kind ~= 'released' and kind ~= 'broken'
local first, since
if usual then first, since = unpack(redis.call('ZPOPMIN', KEYS[2]), 1, 2) end
if usual and not first then
  -- The usual case. A lease lives while its key has more than ``memory`` left, which costs less to
  -- ask than the time. A TTL that is none goes the long way, as does a key without.
  if redis.call('PTTL', KEYS[1]) > math.max(tonumber(ttl) or math.huge, {MEMORY_MS}) then
{FREE}
    return 1
  end
  usual = false
end
"""
    + NOW
    + GRANT
    + f"""
if usual and (tonumber(till) or math.huge) <= now then
  -- It is over, and whoever waits stands where it stood.
  redis.call('ZADD', KEYS[2], since, first)
  redis.call('PEXPIRE', KEYS[2], '{2 * WAITER_MS}')
  usual, first = false, nil
end
if not usual then
"""
    + NUMBERS
    + LIVES
    + f"""
  local at, before = unpack(redis.call('HMGET', KEYS[1], 'at', 'last'), 1, 2)
  if owner ~= me then return end_before(before, past, me) or 'refused' end
  if not lives(owner, till, kind) or kind == 'cooling' then return end_of(kind) end
  -- The clock may have stepped back since the grant: then from now, or the name would stay taken
  -- for as long as the step.
  local cool = math.min(whole(at) or 0, now) + tonumber(ARGV[3])
  if ARGV[3] ~= '0' and cool > now then
    -- In this order for a server out of memory, see RENEW.
    redis.call('PEXPIRE', KEYS[1], cool - now + memory(ttl))
    redis.call('HSET', KEYS[1], 'kind', 'cooling', 'until', cool)
    told = '0 0'
  end
end
local last = me
{HAND_OVER}
if not (handed or told) then
{_STAYS_FREE}
end
return 1
"""
)

UNDO = Script(
    COMMON
    + GRANT
    + f"""
-- KEYS: see above, then the mark of an attempt that was taken back, what it asks for
-- ARGV: name, owner, ms for which the attempt cannot be granted any more, prefix as in RELEASE
-- In this order for a server out of memory, see RENEW.
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[6])
redis.call('SET', KEYS[5], '1', 'PX', ARGV[3])
local name, me, requests, told, first = ARGV[1], ARGV[2], ARGV[4], nil, nil
local last, till, kind, token, past = unpack(
  redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'token', 'past'), 1, 5)
local living = lives(last, till, kind)
if living and (last ~= me or kind == 'cooling') then return end
local how = living and 'released' or end_of(kind)
{HAND_OVER}
if living and not handed then
{_STAYS_FREE}
end
"""
)

BREAK = Script(
    COMMON
    + GRANT
    + f"""
-- KEYS: see above
-- ARGV: name, owner, prefix as in RELEASE
-- Returns 1, or 0 where the owner does not have it.
local name, requests, how, told, first = ARGV[1], ARGV[3], 'broken', nil, nil
local last, till, kind, ttl, token, past = unpack(
  redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'ttl', 'token', 'past'), 1, 6)
if last ~= ARGV[2] or ended(kind) then return 0 end
if not lives(last, till, kind) and redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
-- It may have none.
redis.call('PEXPIRE', KEYS[1], memory(ttl))
{HAND_OVER}
if not handed then
{_STAYS_FREE}
end
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
-- ARGV: process id, prefix of lock keys, the owner of each lock, then the TTL in ms of each or one
--   for all
-- Returns one letter per lock, see FATES.
local day = 86400000
-- First, because a server out of memory refuses ``ZADD`` and ``HSET`` until the script has
-- written something that takes no memory: it grants nothing more, but what is held is renewed.
redis.call('ZREMRANGEBYSCORE', KEYS[1], text(day - now), text(now - day))
redis.call('ZADD', KEYS[1], text(now), ARGV[1])
local letters = {released = 'r', expired = 'e', broken = 'b'}
local call, locks, fates = redis.call, #KEYS - 2, {}
local asked, ttl, ends, forget
for i = 1, locks do
  if i == 1 or #ARGV > locks + 3 then
    -- Once for all where it is the same: half the work of a lock is to format numbers.
    asked = ARGV[2 + locks + i]
    ttl = tonumber(asked)
    ends, forget = text(now + ttl), text(ttl + memory(ttl))
  end
  local lock, me = KEYS[2 + i], ARGV[2 + i]
  local l = call('HMGET', lock, 'owner', 'until', 'kind', 'n', 'ttl')
  local owner, till, kind, n, before = l[1], l[2], l[3], l[4], l[5]
  if owner ~= me then
    local memories = call('HMGET', lock, 'last', 'past')
    fates[i] = letters[end_before(memories[1], memories[2], me)] or 'f'
  elseif kind == 'cooling' or not lives(owner, till, kind) then
    fates[i] = letters[end_of(kind)]
  else
    local left = (whole(till) or now) - now
    n = (whole(n) or 0) + 1
    if left > ttl and left <= (whole(before) or 0) then
      -- One that was sent earlier, for a shorter time, arrives later: it takes nothing away. An
      -- end beyond the TTL comes of a clock that has stepped back, and is put right.
      call('HSET', lock, 'ttl', text(left), 'n', n)
      call('PEXPIRE', lock, text(left + memory(left)))
    else
      call('HSET', lock, 'until', ends, 'ttl', asked, 'n', n)
      call('PEXPIRE', lock, forget)
    end
    fates[i] = 'n'
  end
end
-- Names whose lease ended unseen leave the index little by little.
local some = call('ZRANDMEMBER', KEYS[2], 3)
for _, name in ipairs(some) do
  local l = call('HMGET', ARGV[2] .. name, 'owner', 'until', 'kind')
  if not lives(unpack(l, 1, 3)) and (ended(l[3]) or call('PTTL', ARGV[2] .. name) ~= -1) then
    call('ZREM', KEYS[2], name)
  end
end
return table.concat(fates)
"""
)

LOCKED = Script(
    COMMON
    + """
-- KEYS: lock
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind')
return lives(unpack(l, 1, 3)) and 1 or 0
"""
)

LAST_END = Script(
    COMMON
    + """
-- KEYS: lock
-- Returns {owner, fate} or nothing.
local owner, till, kind = unpack(redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind'), 1, 3)
return owner and owner ~= '' and not lives(owner, till, kind) and {owner, end_of(kind)}
"""
)

GOODBYE = Script(
    COMMON
    + """
-- KEYS: beats
-- ARGV: process id
redis.call('ZADD', KEYS[1], -now, ARGV[1])
"""
)
