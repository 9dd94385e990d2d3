-- Needs: read.

-- Adds to a sorted set, in the place of a value of another type if there is one.
local function add(key, ...)
  if read('ZADD', key, ...) == nil then
    -- It ends at once. For this the user needs no other right.
    redis.call('SET', key, '', 'PXAT', '1')
    redis.call('ZADD', key, ...)
  end
end
