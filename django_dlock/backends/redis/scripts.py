"""The scripts of the Redis backend, each one atomic step; their keys: ``script_parts.py``."""

from __future__ import annotations

from .script_parts import (
    COMMON,
    GRANT,
    HAND_OVER,
    KNOWN_FOR_MS,
    MARGIN_MS,
    MEMORY_MS,
    READ,
    SWEEP,
    Script,
)

__all__ = [
    "ACQUIRE",
    "ASK_AGAIN",
    "BREAK",
    "CANCEL_ACQUIRE",
    "DEREGISTER",
    "LOCKED",
    "OUTCOMES",
    "RELEASE",
    "RENEW",
]

ACQUIRE = Script(
    COMMON
    + GRANT
    + SWEEP
    + f"""
-- KEYS: lock, waiters, index, clock, mark of the request, process, lock to sweep...
-- ARGV: name, owner, ttl ms, kind, process id, metadata, '1' if the caller will wait, owner that
--   may be replaced or '', identity of the process as JSON or '', ms for which a copy of the
--   request may still arrive or ''
-- Returns the token; or, about the lease that is held, these lines: kind, remaining ms, now ms,
-- token, '0' if the waiter's process is not listening here as far as the server can tell, id of the
-- holder's process, owner. They are one text, which a client reads as fast as one element of a
-- list. With the identity of the process, returns a list: that, then names to sweep next.
local name, me, waits = ARGV[1], ARGV[2], ARGV[7] == '1'
local owner, kind, token, past, till, longest, proc, n = unpack(redis.call(
  'HMGET', KEYS[1], 'owner', 'kind', 'token', 'past', 'until', 'ttl', 'proc', 'n'), 1, 8)
local known = redis.call('EXISTS', KEYS[5], KEYS[2]) > 0
local base, ttl = string.sub(KEYS[1], 1, -3 - #name), tonumber(ARGV[3])
if ARGV[9] ~= '' then
  -- SET first, because a full server must refuse it and grant nothing.
  redis.call('SET', KEYS[6], moment .. ' ' .. ARGV[9], 'PX', '{KNOWN_FOR_MS}')
end
-- A copy that arrives after the lease has ended, perhaps many leases later, is granted nothing.
local function mark_granted()
  if ARGV[10] ~= '' then redis.call('SET', KEYS[5], 'granted', 'PX', ARGV[10]) end
end
till, longest = whole(till), whole(longest)
local living = lives(owner, till, kind)
local mark = known and redis.call('GET', KEYS[5])
local mine = living and owner == me and kind ~= 'cooling' and mark ~= '1'
-- The lease that is passed on to this request.
local passed = living and owner == ARGV[8] and kind ~= 'cooling' and not mark
local waiter = table.concat({{me, ARGV[3], ARGV[4], ARGV[5], ARGV[6]}}, '\\n')
if known and (mine or passed or mark or not living or not waits) then
  read('ZREM', KEYS[2], waiter)
end

local function answer()
if mine then
  local new = math.max(till or 0, now + ttl)
  redis.call('HSET', KEYS[1], 'until', new, 'ttl', math.max(longest or 0, ttl),
    'n', math.max(whole(n) or 0, 0))
  redis.call('PEXPIREAT', KEYS[1], new + memory(ttl))
  mark_granted()
  return tonumber(token) or 0
end
if passed then
  living, kind = false, 'released'
end
-- A late copy of a request whose lease was released or broken must not get it again. A waiter that
-- did not notice a lease handed to it goes on with a new request, and so becomes a waiter again.
local over = mark == 'granted' or ended(owner == me and end_of(kind) or end_before(past, me))
if living or mark or over then
  if over or not living then
    return table.concat({{'held', '0', moment, line(token or '0'), '', '', ''}}, '\\n')
  end
  local remaining = till and till - now or 10000
  -- If the end is further away than the TTL, the clock has stepped back. Correct the end, so that
  -- nobody waits for the length of that step.
  if till and longest and longest > 0 and remaining > longest and kind ~= 'cooling' then
    remaining = longest
    redis.call('HSET', KEYS[1], 'until', now + longest)
    redis.call('PEXPIREAT', KEYS[1], now + longest + memory(longest))
  end
  local listens = ''
  if waits and not mark then
    add(KEYS[2], 'NX', micros, waiter)
    -- A server that cannot tell could not hand the lease over either.
    listens = redis.pcall('PUBSUB', 'NUMSUB', base .. 'm:' .. ARGV[5])[2] or '0'
    -- Every waiter asks again when the lease that it found would end.
    if redis.call('PTTL', KEYS[2]) < remaining + {MARGIN_MS} then
      redis.call('PEXPIRE', KEYS[2], remaining + {MARGIN_MS})
    end
  end
  return table.concat({{line(kind or 'held'), text(remaining), moment, line(token or '0'), listens,
    line(proc or ''), owner}}, '\\n')
end

if n == '-1' and owner and kind ~= 'cooling' and not ended(kind) then
  -- It was handed over, and its process has not used it for a whole TTL.
  for _, other in ipairs(read('ZRANGE', KEYS[2], 0, -1) or {{}}) do
    if string.match(other, '^.-\\n.-\\n.-\\n(.-)\\n') == proc then
      redis.call('ZREM', KEYS[2], other)
    end
  end
end
local new = above(token)
grant(name, me, new, ARGV[3], ARGV[4], ARGV[5], ARGV[6], '0',
  remember(past, owner ~= me and owner, string.sub(end_of(kind), 1, 1)))
mark_granted()
return tonumber(new)
end

if ARGV[9] == '' then return answer() end
return swept(answer(), 7, KEYS[3], base, 200)
"""
)

# The name becomes free. First removes, then writes, for a server without memory; see RENEW.
_FREE = """
read('ZREM', KEYS[3], name)
redis.call('HSET', KEYS[1], 'kind', how)
"""
# Sets the key's TTL, too: if another program has removed it, the key would stay for ever.
_STAYS_FREE = f"""
if not handed then
{_FREE}
redis.call('PEXPIRE', KEYS[1], memory(ttl))
end
"""

RELEASE = Script(
    READ
    + f"""
-- KEYS: lock, waiters, index, clock
-- ARGV: name, owner, min_hold ms, key for the MAC of a hand-over or ''
-- Returns 1 if it is released now, else the outcome; 'unknown' if earlier ends were dropped, which
-- may include the release of this owner.
local name, me, how, cools = ARGV[1], ARGV[2], 'released', false
local l = read('HMGET', KEYS[1], 'owner', 'kind', 'ttl', 'token', 'past', 'until')
if not l then return 'refused' end
local owner, kind, ttl, token, past, till = unpack(l, 1, 6)
local waiter, since = unpack(read('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES') or {{}})
-- The usual case. A lease is present as long as its key has more than ``memory`` left, which is
-- faster to ask than the time. A damaged TTL, or a key without one, is handled below.
if ARGV[3] == '0' and owner == me and kind == 'held' and not waiter
  and redis.call('PTTL', KEYS[1]) > math.max(tonumber(ttl) or math.huge, {MEMORY_MS}) then
{_FREE}
  if tonumber(ttl) > {MEMORY_MS} then redis.call('PEXPIRE', KEYS[1], ttl) end
  return 1
end
"""
    + COMMON
    + GRANT
    + f"""
if owner ~= me then
  return end_before(past, me) or string.find(past or '', ';+', 1, true) and 'unknown' or 'refused'
end
if not lives(owner, till, kind) or kind == 'cooling' then return end_of(kind) end
if ARGV[3] ~= '0' then
  -- If the clock has stepped back since the grant, count from now, or the name would stay taken
  -- for the length of that step.
  local cool = math.min(whole(redis.call('HGET', KEYS[1], 'at')) or 0, now) + tonumber(ARGV[3])
  if cool > now then
    -- In this order for a server without memory; see RENEW.
    redis.call('PEXPIRE', KEYS[1], cool - now + memory(ttl))
    redis.call('HSET', KEYS[1], 'kind', 'cooling', 'until', cool)
    cools = true
  end
end
local last, letter, secret = me, 'r', ARGV[4]
{HAND_OVER}
if cools then return 1 end
{_STAYS_FREE}
return 1
"""
)

CANCEL_ACQUIRE = Script(
    COMMON
    + GRANT
    + f"""
-- KEYS: lock, waiters, index, clock, mark of the cancelled attempt
-- ARGV: name, owner, ms for which the request can no longer be granted; TTL in ms, kind, process
--   id and metadata of the request; key for the MAC of a hand-over or ''
-- In this order for a server without memory; see RENEW.
if read('ZREM', KEYS[2], table.concat({{ARGV[2], unpack(ARGV, 4, 7)}}, '\\n')) == 0 then
  -- A caller that cancels for a dead process knows only the owner.
  for _, other in ipairs(read('ZRANGE', KEYS[2], 0, -1) or {{}}) do
    if string.sub(other, 1, #ARGV[2] + 1) == ARGV[2] .. '\\n' then
      redis.call('ZREM', KEYS[2], other)
    end
  end
end
redis.call('SET', KEYS[5], '1', 'PX', ARGV[3])
local name, me, how, cools, secret = ARGV[1], ARGV[2], 'released', false, ARGV[8]
local waiter, since
local l = read('HMGET', KEYS[1], 'owner', 'until', 'kind', 'ttl', 'token', 'past')
if not l then return end
local last, till, kind, ttl, token, past = unpack(l, 1, 6)
local living = lives(last, till, kind)
if living and (last ~= me or kind == 'cooling') then return end
local letter = string.sub(living and how or end_of(kind), 1, 1)
{HAND_OVER}
if living then
{_STAYS_FREE}
end
"""
)

BREAK = Script(
    COMMON
    + GRANT
    + f"""
-- KEYS: lock, waiters, index, clock
-- ARGV: name, owner, an id of this call, key for the MAC of a hand-over or ''
-- Returns 1, or 0 if the owner does not hold it; a repeated call returns what the first one did.
local name, how, letter, cools, secret = ARGV[1], 'broken', 'b', false, ARGV[4]
local waiter, since
local l = read('HMGET', KEYS[1], 'owner', 'until', 'kind', 'ttl', 'token', 'past')
if not l then
  -- A value of another type is no lease. An operator who has seen that it has no owner removes it.
  if ARGV[2] ~= '' then return 0 end
  redis.call('SET', KEYS[1], '', 'PXAT', '1')
  read('ZREM', KEYS[3], name)
  return 1
end
local last, till, kind, ttl, token, past = unpack(l, 1, 6)
if last ~= ARGV[2] or ended(kind) then
  return redis.call('HGET', KEYS[1], 'breaker') == ARGV[3] and 1 or 0
end
if not lives(last, till, kind) and redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
{HAND_OVER}
{_STAYS_FREE}
redis.call('HSET', KEYS[1], 'breaker', ARGV[3])
return 1
"""
)

OUTCOMES = {
    "n": "renewed",
    "r": "released",
    "e": "expired",
    "b": "broken",
    "f": "refused",
}
"""The meaning of each character in ``RENEW``'s answer."""

RENEW = Script(
    COMMON
    + SWEEP
    + f"""
-- KEYS: process, index, lock..., lock to sweep...
-- ARGV: identity of the process as JSON, prefix of all keys, number of locks, the owner of each
--   lock, then the TTL in ms of each or one for all; for a single lock, optionally the number of a
--   renewal that may shorten its lease
-- Returns a list: one character per lock, see OUTCOMES; then names to sweep next.
-- PEXPIRE first: a server without memory refuses SET and HSET until the script has run a write
-- command that takes no memory. So it grants nothing, but still renews what is held.
redis.call('PEXPIRE', KEYS[1], '{KNOWN_FOR_MS}')
redis.call('SET', KEYS[1], moment .. ' ' .. ARGV[1], 'PX', '{KNOWN_FOR_MS}')
local call, count, outcomes = redis.call, tonumber(ARGV[3]), {{}}
local asked, ttl, ends, forget
local shorten = count == 1 and tonumber(ARGV[6]) or 0
for i = 1, count do
  if i == 1 or #ARGV > count + 4 then
    -- Only once if it is the same for all, because formatting numbers is half the work.
    asked = ARGV[3 + count + i]
    ttl = tonumber(asked)
    ends, forget = text(now + ttl), text(now + ttl + memory(ttl))
  end
  local lock, me = KEYS[2 + i], ARGV[3 + i]
  -- Only one of many leases may be lost if another program has overwritten it.
  local l = redis.pcall('HMGET', lock, 'owner', 'until', 'kind', 'n', 'ttl')
  if l.err then l = read('HMGET', lock, 'owner') or {{}} end
  local owner, till, kind, n, before = l[1], l[2], l[3], l[4], l[5]
  if owner ~= me then
    outcomes[i] = string.sub(end_before(read('HGET', lock, 'past'), me) or 'f', 1, 1)
  elseif kind == 'cooling' or not lives(owner, till, kind) then
    outcomes[i] = string.sub(end_of(kind), 1, 1)
  else
    local left = (whole(till) or now) - now
    n = math.max(whole(n) or 0, 0) + 1
    if shorten > 0 then
      -- The field may be that of an earlier owner.
      local whose, last = string.match(call('HGET', lock, 'short') or '', '^(.*):(%d+)$')
      if whose ~= me or shorten > tonumber(last) then
        before = 0
        call('HSET', lock, 'short', me .. ':' .. shorten)
      end
    end
    if left > ttl and left <= (whole(before) or 0) then
      -- An older renewal with a shorter TTL has arrived late: keep the end. But if the end is
      -- further away than the previous TTL, the clock has stepped back: correct the end.
      call('HSET', lock, 'ttl', text(left), 'n', n)
      call('PEXPIREAT', lock, text(now + left + memory(left)))
    else
      call('HSET', lock, 'until', ends, 'ttl', asked, 'n', n)
      call('PEXPIREAT', lock, forget)
    end
    outcomes[i] = 'n'
  end
end
return swept(table.concat(outcomes), 3 + count, KEYS[2], ARGV[2], 1000)
"""
)

ASK_AGAIN = Script(
    COMMON
    + """
-- KEYS: lock, waiters
-- ARGV: name
-- Tells all waiters to ask again: they sleep until the end that they know, which is nearer now.
local channels = string.sub(KEYS[1], 1, -3 - #ARGV[1]) .. 'm:'
for _, each in ipairs(read('ZRANGE', KEYS[2], 0, -1) or {}) do
  local owner, proc = string.match(each, '^(.-)\\n.-\\n.-\\n(.-)\\n')
  if owner then redis.pcall('PUBLISH', channels .. proc, owner .. ' 0') end
end
"""
)

LOCKED = Script(
    COMMON
    + """
-- KEYS: lock
-- A value of another type is no lease, but a name that has one cannot be acquired.
local l = read('HMGET', KEYS[1], 'owner', 'until', 'kind')
if not l then return 1 end
return lives(unpack(l, 1, 3)) and 1 or 0
"""
)

DEREGISTER = Script(
    COMMON
    + SWEEP
    + """
-- KEYS: process, index, lock to sweep...
-- ARGV: prefix of all keys
-- An hour is long enough for other processes to see it; its leases have been released.
local known = read('GET', KEYS[1])
redis.call('SET', KEYS[1], '-' .. moment .. ' ' .. (known and string.match(known, '{.*') or ''),
  'PX', '3600000')
clean(3, KEYS[2], ARGV[1])
"""
)
