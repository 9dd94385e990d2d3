-- Reads what is known of processes.
--
-- KEYS:
--   process...: its heartbeat
-- ARGV:
--   channel...: of each process, or none if its subscriptions do not matter
-- Answer:
--   a list: for each process its heartbeat and identity, cut if they are huge, and how many
--   subscriptions it has

--- include read

local found = {}
for i, process in ipairs(KEYS) do
  local channel = ARGV[i]
  found[#found + 1] = string.sub(read('GET', process) or '', 1, LONGEST)
  -- A user without the permission to ask must still see the others.
  found[#found + 1] = channel and redis.pcall('PUBSUB', 'NUMSUB', channel)[2] or 0
end
return found
