-- Wakes the waiters: they sleep until the end that they know, which is nearer now.
--
-- KEYS:
--   lock
--   queue: the waiters
-- ARGV:
--   name
-- Answer: none

local lock, queue = unpack(KEYS)
local name = ARGV[1]

--- include read
--- include ask_all_again

ask_all_again()
