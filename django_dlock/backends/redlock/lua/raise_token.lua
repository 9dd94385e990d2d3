-- Gives the owner's lease the token that the quorum chose.
--
-- KEYS:
--   lock
--   index
--   clock
-- ARGV:
--   name
--   me: the owner
--   token
-- Answer:
--   1, or 0 if the owner has no lease

local lock, index, clock = unpack(KEYS)
local name, me, token = unpack(ARGV)

--- include read
--- include add
--- include now
--- include lease

local owner, till, kind = unpack(read('HMGET', lock, 'owner', 'until', 'kind') or {}, 1, 3)
if owner ~= me or kind == 'cooling' or not lives(owner, till, kind) then return 0 end
local highest = whole(read('GET', clock))
if not highest or highest < tonumber(token) then redis.call('SET', clock, token) end
redis.call('HSET', lock, 'token', token)
add(index, token, name)
return 1
