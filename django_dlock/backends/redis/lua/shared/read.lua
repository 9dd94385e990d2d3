-- Another program may have put a value of another type in the place of a key. A script that reads
-- many keys must not end at one of them.

-- The reply; nil if the key has another type.
local function read(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  -- Any other error reaches the caller as it is.
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then redis.call(...) end
end
