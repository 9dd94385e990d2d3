-- Withdraws a grant that found no quorum and leaves no trace: the same owner may ask again. A later
-- try keeps its grant.
--
-- KEYS:
--   lock
--   index
--   try: number of the owner's latest try
-- ARGV:
--   name
--   me: the owner
--   number: of the try
-- Answer:
--   1, or 0 if the owner has tried again

local lock, index, try = unpack(KEYS)
local name, me, number = unpack(ARGV)

--- include read
--- include now
--- include lease

if (tonumber(read('GET', try) or '') or 0) > tonumber(number) then return 0 end
local owner, kind = unpack(read('HMGET', lock, 'owner', 'kind') or {}, 1, 2)
if owner == me and kind ~= 'cooling' and not ended(kind) then
  read('ZREM', index, name)
  redis.call('HSET', lock, 'owner', '')
end
return 1
