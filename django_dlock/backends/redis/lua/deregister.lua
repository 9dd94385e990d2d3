-- Notes that a process has ended.
--
-- KEYS:
--   process: its heartbeat
--   index
--   swept...: locks to sweep
-- ARGV:
--   base: prefix of all keys
-- Answer: none

local process, index = unpack(KEYS, 1, 2)
local base = ARGV[1]

--- include read
--- include now
--- include lease
--- include clean

-- An hour is long enough for other processes to see it; its leases have been released.
local known = read('GET', process)
redis.call('SET', process, '-' .. moment .. ' ' .. (known and string.match(known, '{.*') or ''),
  'PX', '3600000')
clean(3)
