-- Whether a name is held.
--
-- KEYS:
--   lock
-- ARGV: none
-- Answer:
--   1 or 0

local lock = KEYS[1]

--- include read
--- include now
--- include lease

local l = read('HMGET', lock, 'owner', 'until', 'kind')
if l then return lives(unpack(l, 1, 3)) and 1 or 0 end
-- A value of another type is no lease, but a name that has one cannot be acquired.
return 1
