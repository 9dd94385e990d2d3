-- Reads a part of the index. Starts at a rank and continues by token, which stays correct while
-- names come and go.
--
-- KEYS:
--   index
-- ARGV:
--   cursor: '' at first
--   rank: of the first name
--   most: how many names to read
--   order: '1' for newest first
-- Answer:
--   a list: cursor, or '' at the end; names in the index; name...

local index = KEYS[1]
local cursor, rank, most, order = unpack(ARGV)

local size, newest = tonumber(most), order == '1'
local call, names = redis.call, {}
if size == 0 then
  cursor = ''
elseif cursor == '' then
  names = call(newest and 'ZREVRANGE' or 'ZRANGE', index, rank, rank + size - 1)
elseif newest then
  names = call('ZREVRANGEBYSCORE', index, '(' .. cursor, '-inf', 'LIMIT', 0, size)
else
  names = call('ZRANGEBYSCORE', index, '(' .. cursor, '+inf', 'LIMIT', 0, size)
end
-- Only for the last one, because formatting scores is slow.
cursor = size > 0 and #names == size and call('ZSCORE', index, names[size]) or ''
return {cursor, call('ZCARD', index), unpack(names)}
