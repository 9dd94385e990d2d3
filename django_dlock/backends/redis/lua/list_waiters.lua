-- Reads the first waiters for a name.
--
-- KEYS:
--   queue: the waiters
-- ARGV:
--   most: how many waiters to read
-- Answer:
--   a list: now ms; JSON [[request, arrival in µs, process], ...]

local queue = KEYS[1]
local most = ARGV[1]

--- include read
--- include now

local found = {}
local waiters = read('ZRANGE', queue, 0, tonumber(most) - 1, 'WITHSCORES') or {}
for i = 1, #waiters, 2 do
  local process = string.match(waiters[i], '^.-\n.-\n.-\n(.-)\n') or ''
  -- A huge request would take the time and the memory of everybody who reads the page.
  found[#found + 1] = {string.sub(waiters[i], 1, LONGEST), waiters[i + 1], process}
end
return {moment, cjson.encode(found)}
