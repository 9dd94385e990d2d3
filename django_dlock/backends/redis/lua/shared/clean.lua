-- Needs: index, base; read, lease.

-- Removes from the index the names of the last keys, from ``first``, that are free. Returns how
-- many those were.
local function clean(first)
  local dead = 0
  for i = first, #KEYS do
    local l = read('HMGET', KEYS[i], 'owner', 'until', 'kind')
    if l and not lives(l[1], l[2], l[3])
      and (ended(l[3]) or redis.call('PTTL', KEYS[i]) ~= -1) then
      dead = dead + (read('ZREM', index, string.sub(KEYS[i], #base + #'LOCKS' + 1)) or 0)
    end
  end
  return dead
end
