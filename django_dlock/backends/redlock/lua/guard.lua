-- Refuses a script whose answer may say that a name is free, while the node is kept out. Stands
-- before the script, in the same step; the script finds its own keys and arguments only.
--
-- KEYS:
--   script...: those of the script
--   node: since when it has run without a break, or is kept out
-- ARGV:
--   script...: those of the script
--   keep: ms for which a node is kept out
--   run: run id of the server
-- Answer:
--   that of the script, or an error
do
  local run, keep = table.remove(ARGV), tonumber(table.remove(ARGV))
  local node = table.remove(KEYS)
  -- A value of another type says nothing.
  local known = redis.pcall('GET', node)
  if type(known) ~= 'string' then known = false end
  if known ~= run .. ' joined' then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    local whose, since = string.match(known or '', '^(%w+) (%d+)$')
    since = tonumber(since)
    if whose ~= run or since > now then
      since = now
      redis.call('SET', node, run .. ' ' .. string.format('%.0f', now))
    end
    if now - since < keep then
      return redis.error_reply('KEPT_OUT it was started or flushed a moment ago and may have '
        .. 'forgotten leases; it grants nothing for ' .. string.format('%.1f', (since + keep - now)
        / 1000) .. ' s')
    end
    redis.call('SET', node, run .. ' joined')
  end
end
