-- Ends a lease. Needs: lock, queue, name; read, lease, grant, free.

local function first_waiter()
  return unpack(read('ZRANGE', queue, 0, 0, 'WITHSCORES') or {})
end

-- Gives the name to the first waiter whose process listens; returns whether there is one.
-- ``secret`` is the key for MACs or ''. ``token``, ``last`` (its owner), ``letter`` (how it ended)
-- and ``past`` are those of the previous lease. ``waiter`` and ``since`` are the first waiter, if
-- the caller knows it.
local function hand_over(secret, token, last, letter, past, waiter, since)
  local handed, gone = false, {}
  local channels = string.sub(lock, 1, -1 - #'LOCKS' - #name) .. 'CHANNELS'
  if not waiter then waiter, since = first_waiter() end
  while waiter and not handed do
    local owner, ttl, kind, proc, meta = string.match(waiter, '^(.-)\n(.-)\n(.-)\n(.-)\n(.*)$')
    local listeners = 0
    -- A request without a duration was not written by us, and cannot be granted.
    if owner and (whole(ttl) or 0) > 0 and not gone[proc] then
      -- Asked before publishing: a message without a listener here could still reach, through a
      -- replica, a process that listens to a former primary.
      listeners = redis.pcall('PUBSUB', 'NUMSUB', channels .. proc)[2]
    end
    -- A user without the permission for this or for publishing must still be able to release.
    if not listeners then break end
    -- This takes no memory, so a full server then accepts the commands that follow.
    redis.call('ZREM', queue, waiter)
    if listeners > 0 then
      local new = above(token)
      local message = owner .. ' ' .. new
      if secret ~= '' then
        message = message .. ' ' .. redis.sha1hex(
          secret .. redis.sha1hex(secret .. channels .. proc .. ' ' .. message))
      end
      local heard = redis.pcall('PUBLISH', channels .. proc, message)
      if type(heard) ~= 'number' then
        redis.call('ZADD', queue, since, waiter)
        redis.call('PEXPIRE', queue, 'MARGIN_MS')
        break
      end
      -- Even if the server says that nobody has received it: whoever has relies on this grant.
      handed = true
      grant(owner, new, ttl, kind, proc, meta, '-1', remember(past, last, letter))
    else
      gone[proc or ''] = true
      waiter, since = first_waiter()
    end
  end
  return handed
end

-- If nobody gets it. Sets the key's TTL, too: if another program has removed it, the key would
-- stay for ever.
local function stay_free(how, ttl)
  free(how)
  redis.call('PEXPIRE', lock, memory(ttl))
end
