-- The name becomes free. Needs: lock, index, name; read.
local function free(how)
  -- First removes, then writes, for a server without memory; see renew.lua.
  read('ZREM', index, name)
  redis.call('HSET', lock, 'kind', how)
end
