-- Ends a lease for an operator: the first waiter gets the name, or it becomes free.
--
-- KEYS:
--   lock
--   queue: the waiters
--   index
--   clock
-- ARGV:
--   name
--   holder: the owner as the operator saw it
--   breaker: an id of this call
--   secret: key for the MAC of a hand-over, or ''
-- Answer:
--   1, or 0 if the owner does not hold it; a repeated call returns what the first one did

local lock, queue, index, clock = unpack(KEYS)
local name, holder, breaker, secret = unpack(ARGV)

--- include read
--- include add
--- include now
--- include lease
--- include grant
--- include free
--- include hand_over

local l = read('HMGET', lock, 'owner', 'until', 'kind', 'ttl', 'token', 'past')
local last, till, kind, ttl, token, past = unpack(l or {}, 1, 6)
if l and last == holder and not ended(kind)
  and (lives(last, till, kind) or redis.call('PTTL', lock) == -1) then
  -- The owner of a name that cools has released it, and may repeat that.
  local how = kind == 'cooling' and 'released' or 'broken'
  if not hand_over(secret, token, last, string.sub(how, 1, 1), past) then stay_free(how, ttl) end
  redis.call('HSET', lock, 'breaker', breaker)
  return 1
end

if not l then
  -- A value of another type is no lease. An operator who has seen that it has no owner removes it.
  if holder ~= '' then return 0 end
  redis.call('SET', lock, '', 'PXAT', '1')
  read('ZREM', index, name)
  return 1
end
-- It has expired.
if last == holder and not ended(kind) then return 0 end
return redis.call('HGET', lock, 'breaker') == breaker and 1 or 0
