-- Tells all waiters to ask again; they keep their positions, because any of them may give up.
-- Needs: lock, queue, name; read.
local function ask_all_again()
  local channels = string.sub(lock, 1, -1 - #'LOCKS' - #name) .. 'CHANNELS'
  for _, each in ipairs(read('ZRANGE', queue, 0, -1) or {}) do
    local owner, proc = string.match(each, '^(.-)\n.-\n.-\n(.-)\n')
    if owner then redis.pcall('PUBLISH', channels .. proc, owner .. ' 0') end
  end
end
