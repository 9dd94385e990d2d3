-- Ends the lease of an owner: the first waiter gets the name, or it becomes free.
--
-- KEYS:
--   lock
--   queue: the waiters
--   index
--   clock
-- ARGV:
--   name
--   me: the owner
--   min_hold: ms for which the name stays taken after the grant
--   secret: key for the MAC of a hand-over, or ''
-- Answer:
--   1 if it is released now, else the outcome; 'unknown' if earlier ends were dropped, which may
--   include the release of this owner

local lock, queue, index, clock = unpack(KEYS)
local name, me, min_hold, secret = unpack(ARGV)

--- include read
--- include free

local l = read('HMGET', lock, 'owner', 'kind', 'ttl', 'token', 'past', 'until')
if not l then return 'refused' end
local owner, kind, ttl, token, past, till = unpack(l, 1, 6)
local waiter, since = unpack(read('ZRANGE', queue, 0, 0, 'WITHSCORES') or {})

-- The usual case. A lease is present as long as its key has more than ``memory`` left, which is
-- faster to ask than the time. A damaged TTL, or a key without one, is handled below.
if min_hold == '0' and owner == me and kind == 'held' and not waiter
  and redis.call('PTTL', lock) > math.max(tonumber(ttl) or math.huge, MEMORY_MS) then
  free('released')
  if tonumber(ttl) > MEMORY_MS then redis.call('PEXPIRE', lock, ttl) end
  return 1
end

--- include add
--- include now
--- include lease
--- include grant
--- include hand_over
--- include ask_all_again

if owner ~= me then
  return end_before(past, me) or string.find(past or '', ';+', 1, true) and 'unknown' or 'refused'
end
if not lives(owner, till, kind) or kind == 'cooling' then return end_of(kind) end

if min_hold ~= '0' then
  -- If the clock has stepped back since the grant, count from now, or the name would stay taken
  -- for the length of that step.
  local cool = math.min(whole(redis.call('HGET', lock, 'at')) or 0, now) + tonumber(min_hold)
  if cool > now then
    -- In this order for a server without memory; see renew.lua.
    redis.call('PEXPIRE', lock, cool - now + memory(ttl))
    redis.call('HSET', lock, 'kind', 'cooling', 'until', cool)
    ask_all_again()
    return 1
  end
end

if not hand_over(secret, token, me, 'r', past, waiter, since) then stay_free('released', ttl) end
return 1
