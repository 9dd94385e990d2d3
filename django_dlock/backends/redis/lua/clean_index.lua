-- Removes free names from the index.
--
-- KEYS:
--   index
--   lock...: of each name
-- ARGV:
--   base: prefix of all keys
-- Answer:
--   how many were free

local index = KEYS[1]
local base = ARGV[1]

--- include read
--- include now
--- include lease
--- include clean

return clean(2)
