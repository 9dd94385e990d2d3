-- Grants a name, or says which lease holds it; the caller then becomes a waiter if it will wait.
--
-- KEYS:
--   lock
--   queue: the waiters
--   index
--   clock
--   request: mark of the request
--   process: heartbeat of the caller's process
--   swept...: locks to sweep
-- ARGV:
--   name
--   me: the owner
--   asked: TTL in ms
--   my_kind
--   my_process: its id
--   my_meta: metadata
--   waits: '1' if the caller will wait
--   replaces: owner that may be replaced, or ''
--   identity: of the process as JSON, or ''
--   late: ms for which a copy of the request may still arrive, or ''
-- Answer:
--   the token; or, about the lease that is held, these lines: kind, remaining ms, now ms, token,
--   '0' if the waiter's process is not listening here as far as the server can tell, id of the
--   holder's process, owner. They are one text, which a client reads as fast as one element of a
--   list. With the identity of the process, a list: that, then names to sweep next.

local lock, queue, index, clock, request, process = unpack(KEYS, 1, 6)
local name, me, asked, my_kind, my_process, my_meta, waits, replaces, identity, late = unpack(ARGV)

local base = string.sub(lock, 1, -1 - #'LOCKS' - #name)

--- include read
--- include add
--- include now
--- include lease
--- include grant
--- include clean
--- include sweep

local owner, kind, token, past, till, longest, proc, n = unpack(redis.call(
  'HMGET', lock, 'owner', 'kind', 'token', 'past', 'until', 'ttl', 'proc', 'n'), 1, 8)
local known = redis.call('EXISTS', request, queue) > 0
if identity ~= '' then
  -- SET first, because a full server must refuse it and grant nothing.
  redis.call('SET', process, moment .. ' ' .. identity, 'PX', 'KNOWN_FOR_MS')
end
till, longest = whole(till), whole(longest)
local living = lives(owner, till, kind)
local mark = known and redis.call('GET', request)
local mine = living and owner == me and kind ~= 'cooling' and mark ~= '1'
-- The lease that is passed on to this request.
local passed = living and owner == replaces and kind ~= 'cooling' and not mark
local waiter = table.concat({me, asked, my_kind, my_process, my_meta}, '\n')
if known and (mine or passed or mark or not living or waits ~= '1') then
  read('ZREM', queue, waiter)
end
if passed and not mine then
  living, kind = false, 'released'
end
-- A late copy of a request whose lease has ended must not get it again. A waiter that did not notice
-- a lease handed to it goes on with a new request, and so becomes a waiter again.
local over = mark == 'granted' or owner == me or end_before(past, me)

-- A copy that arrives after the lease has ended, perhaps many leases later, is granted nothing.
local function mark_granted()
  if late ~= '' then redis.call('SET', request, 'granted', 'PX', late) end
end

-- As one of the lines of the answer.
local function line(field) return (string.gsub(field, '[\r\n]', ' ')) end

local function answer()
  if not (living or mark or over) then
    if n == '-1' and owner and kind ~= 'cooling' and not ended(kind) then
      -- It was handed over, and its process has not used it for a whole TTL.
      for _, other in ipairs(read('ZRANGE', queue, 0, -1) or {}) do
        if string.match(other, '^.-\n.-\n.-\n(.-)\n') == proc then
          redis.call('ZREM', queue, other)
        end
      end
    end
    local new = above(token)
    grant(me, new, asked, my_kind, my_process, my_meta, '0',
      remember(past, owner, string.sub(end_of(kind), 1, 1)))
    mark_granted()
    return tonumber(new)
  end

  -- A repeated request, of which the first copy was granted.
  if mine then
    local ttl = tonumber(asked)
    local new = math.max(till or 0, now + ttl)
    redis.call('HSET', lock, 'until', new, 'ttl', math.max(longest or 0, ttl),
      'n', math.max(whole(n) or 0, 0))
    redis.call('PEXPIREAT', lock, new + memory(ttl))
    mark_granted()
    return tonumber(token) or 0
  end

  if over or not living then
    return table.concat({'held', '0', moment, line(token or '0'), '', '', ''}, '\n')
  end

  local remaining = till and till - now or 10000
  -- If the end is further away than the TTL, the clock has stepped back. Correct the end, so that
  -- nobody waits for the length of that step.
  if till and longest and longest > 0 and remaining > longest and kind ~= 'cooling' then
    remaining = longest
    redis.call('HSET', lock, 'until', now + longest)
    redis.call('PEXPIREAT', lock, now + longest + memory(longest))
  end
  local listens = ''
  if waits == '1' and not mark then
    add(queue, 'NX', micros, waiter)
    -- A server that cannot tell could not hand the lease over either.
    listens = redis.pcall('PUBSUB', 'NUMSUB', base .. 'CHANNELS' .. my_process)[2] or '0'
    -- Every waiter asks again when the lease that it found would end.
    if redis.call('PTTL', queue) < remaining + MARGIN_MS then
      redis.call('PEXPIRE', queue, remaining + MARGIN_MS)
    end
  end
  return table.concat({line(kind or 'held'), text(remaining), moment, line(token or '0'), listens,
    line(proc or ''), owner}, '\n')
end

if identity == '' then return answer() end
return swept(answer(), 7, 200)
