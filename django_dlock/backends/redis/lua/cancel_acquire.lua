-- Withdraws a request: it waits no longer, and what it was granted ends.
--
-- KEYS:
--   lock
--   queue: the waiters
--   index
--   clock
--   request: mark of the request
-- ARGV:
--   name
--   me: the owner
--   late: ms for which the request can no longer be granted
--   asked: its TTL in ms
--   my_kind
--   my_process: id of its process
--   my_meta: metadata
--   secret: key for the MAC of a hand-over, or ''
-- Answer: none

local lock, queue, index, clock, request = unpack(KEYS)
local name, me, late, asked, my_kind, my_process, my_meta, secret = unpack(ARGV)

--- include read
--- include add
--- include now
--- include lease
--- include grant
--- include free
--- include hand_over

-- In this order for a server without memory; see renew.lua.
local waiter = table.concat({me, asked, my_kind, my_process, my_meta}, '\n')
if read('ZREM', queue, waiter) == 0 then
  -- A caller that cancels for a dead process knows only the owner.
  for _, other in ipairs(read('ZRANGE', queue, 0, -1) or {}) do
    if string.sub(other, 1, #me + 1) == me .. '\n' then
      redis.call('ZREM', queue, other)
    end
  end
end
redis.call('SET', request, '1', 'PX', late)

local l = read('HMGET', lock, 'owner', 'until', 'kind', 'ttl', 'token', 'past')
if not l then return end
local last, till, kind, ttl, token, past = unpack(l, 1, 6)
local living = lives(last, till, kind)
if living and (last ~= me or kind == 'cooling') then return end
local letter = string.sub(living and 'released' or end_of(kind), 1, 1)
if not hand_over(secret, token, last, letter, past) and living then stay_free('released', ttl) end
