-- Prolongs leases, and keeps the identity of their process.
--
-- KEYS:
--   process: its heartbeat
--   index
--   lock...
--   swept...: locks to sweep
-- ARGV:
--   identity: of the process as JSON
--   base: prefix of all keys
--   locks: how many
--   owner...: of each lock
--   ttl...: in ms, of each lock or one for all
--   shorten?: for a single lock, the number of a renewal that may shorten its lease
-- Answer:
--   a list: one character per lock, see OUTCOMES in scripts.py; then names to sweep next

local process, index = unpack(KEYS, 1, 2)
local identity, base, locks = unpack(ARGV, 1, 3)

--- include read
--- include now
--- include lease
--- include clean
--- include sweep

local count = tonumber(locks)
local shorten = count == 1 and tonumber(ARGV[6]) or 0
-- PEXPIRE first: a server without memory refuses SET and HSET until the script has run a write
-- command that takes no memory. So it grants nothing, but still renews what is held.
redis.call('PEXPIRE', process, 'KNOWN_FOR_MS')
redis.call('SET', process, moment .. ' ' .. identity, 'PX', 'KNOWN_FOR_MS')
local call, outcomes = redis.call, {}
local asked, ttl, ends, forget
for i = 1, count do
  if i == 1 or #ARGV > count + 4 then
    -- Only once if it is the same for all, because formatting numbers is half the work.
    asked = ARGV[3 + count + i]
    ttl = tonumber(asked)
    ends, forget = text(now + ttl), text(now + ttl + memory(ttl))
  end
  local lock, me = KEYS[2 + i], ARGV[3 + i]
  -- Only one of many leases may be lost if another program has overwritten it.
  local l = redis.pcall('HMGET', lock, 'owner', 'until', 'kind', 'n', 'ttl')
  if l.err then l = read('HMGET', lock, 'owner') or {} end
  local owner, till, kind, n, before = l[1], l[2], l[3], l[4], l[5]
  if owner == me and kind ~= 'cooling' and lives(owner, till, kind) then
    local left = (whole(till) or now) - now
    n = math.max(whole(n) or 0, 0) + 1
    if shorten > 0 then
      -- The field may be that of an earlier owner.
      local whose, last = string.match(call('HGET', lock, 'short') or '', '^(.*):(%d+)$')
      if whose ~= me or shorten > tonumber(last) then
        before = 0
        call('HSET', lock, 'short', me .. ':' .. shorten)
      end
    end
    -- If the end is further away than the previous TTL, the clock has stepped back.
    if left <= ttl or left > (whole(before) or 0) then
      call('HSET', lock, 'until', ends, 'ttl', asked, 'n', n)
      call('PEXPIREAT', lock, forget)
    else
      -- An older renewal with a shorter TTL has arrived late: keep the end.
      call('HSET', lock, 'ttl', text(left), 'n', n)
      call('PEXPIREAT', lock, text(now + left + memory(left)))
    end
    outcomes[i] = 'n'
  elseif owner == me then
    outcomes[i] = string.sub(end_of(kind), 1, 1)
  else
    outcomes[i] = string.sub(end_before(read('HGET', lock, 'past'), me) or 'f', 1, 1)
  end
end
return swept(table.concat(outcomes), 3 + count, 1000)
