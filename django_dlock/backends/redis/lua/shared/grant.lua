-- Gives the name to an owner. Needs: lock, index, clock, name; read, add, now.

-- A new token: higher than all earlier ones, so that tokens rise even if the clock steps back, and
-- at least the clock's time, so that they rise even if the server has lost its data.
local function above(token)
  local new, least = micros, tonumber(token)
  if least and least >= tonumber(new) and least < EXACT then
    new = string.format('%.0f', least + 1)
  end
  local before = read('SET', clock, new, 'GET')
  if before == nil then redis.call('SET', clock, new) end
  least = tonumber(before)
  if least and least >= tonumber(new) and least < EXACT then
    new = string.format('%.0f', least + 1)
    redis.call('SET', clock, new)
  end
  return new
end

-- Adds ``last``, the previous owner, and the letter of how its lease ended. A repeated release and
-- a late copy of an acquire find it there.
local function remember(past, last, letter)
  if not last or last == '' then return past or '' end
  past = ';' .. last .. ':' .. letter .. (past and past ~= '' and past or ';')
  if #past <= PAST_BYTES then return past end
  local kept = string.match(string.sub(past, 1, KEPT_BYTES), '^.*;') or ';'
  for lost in string.gmatch(string.sub(past, #kept + 1), '[^;]*:[be];') do
    if #kept + #lost < PAST_BYTES then kept = kept .. lost end
  end
  return kept .. '+'
end

local function grant(owner, token, ttl, kind, proc, meta, n, past)
  redis.call('HSET', lock, 'owner', owner, 'until', now + ttl, 'kind', kind, 'token', token,
    'ttl', ttl, 'at', moment, 'n', n, 'proc', proc, 'meta', meta, 'past', past)
  -- Exactly as long after ``until`` as release.lua relies on, however long this script takes.
  redis.call('PEXPIREAT', lock, now + ttl + math.max(ttl, MEMORY_MS))
  add(index, token, name)
end
