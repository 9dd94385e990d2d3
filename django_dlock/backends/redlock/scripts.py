"""What the scripts of the Redis backend lack for a quorum.

Each node keeps one further key, ``…:node``. It is ``<run id> joined`` while the server has run
without a break, and kept its data, since it joined the quorum. A server gets a new run id whenever
it starts, so a node that was restarted, with or without its data, or that was flushed, is noticed
by its next command. It then notes since when it is kept out: ``<run id> <ms>``.

An acquire that found no quorum is withdrawn, and then tried again by the same owner. The key
``…:w:<owner>`` has the number of the latest try, so that a withdrawal that comes late, on a
connection that was given up since, ends no grant of a later try.
"""

from __future__ import annotations

from ..redis.listing_scripts import NAMES, ROWS
from ..redis.script_parts import COMMON, Script
from ..redis.scripts import ACQUIRE, LOCKED

__all__ = ["ACQUIRE_AGAIN", "GUARDED", "KEPT_OUT", "RAISE_TOKEN", "WITHDRAW"]

KEPT_OUT = "KEPTOUT"
"""The error code of a node that is kept out."""

# Runs before a script whose answer may say that a name is free, in the same step. The script finds
# its own keys and arguments only.
_GUARD = f"""
-- KEYS: those of the script, then node
-- ARGV: those of the script, then ms for which a node is kept out, run id of the server
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
      return redis.error_reply('{KEPT_OUT} it was started or flushed a moment ago and may have '
        .. 'forgotten leases; it grants nothing for ' .. string.format('%.1f', (since + keep - now)
        / 1000) .. ' s')
    end
    redis.call('SET', node, run .. ' joined')
  end
end
"""

_AGAIN = """
-- KEYS: those of the script, then number of the owner's latest try
-- ARGV: those of the script, then number of this try, ms for which a withdrawal may be late
do
  local late, number = table.remove(ARGV), table.remove(ARGV)
  redis.call('SET', table.remove(KEYS), number, 'PX', late)
end
"""

ACQUIRE_AGAIN = Script(_AGAIN + _GUARD + ACQUIRE.source)
"""``ACQUIRE`` by an owner whose earlier try was withdrawn; guarded like the others."""

GUARDED = {script: Script(_GUARD + script.source) for script in (ACQUIRE, LOCKED, NAMES, ROWS)}
"""The scripts that a node refuses while it is kept out."""

RAISE_TOKEN = Script(
    COMMON
    + """
-- KEYS: lock, index, clock
-- ARGV: name, owner, token
-- Gives the owner's lease the token that the quorum chose. Returns 1, or 0 if it has none.
local owner, till, kind = unpack(read('HMGET', KEYS[1], 'owner', 'until', 'kind') or {}, 1, 3)
if owner ~= ARGV[2] or kind == 'cooling' or not lives(owner, till, kind) then return 0 end
local highest = whole(read('GET', KEYS[3]))
if not highest or highest < tonumber(ARGV[3]) then redis.call('SET', KEYS[3], ARGV[3]) end
redis.call('HSET', KEYS[1], 'token', ARGV[3])
add(KEYS[2], ARGV[3], ARGV[1])
return 1
"""
)

WITHDRAW = Script(
    COMMON
    + """
-- KEYS: lock, index, number of the owner's latest try
-- ARGV: name, owner, number of the try
-- Withdraws a grant that found no quorum and leaves no trace: the same owner may ask again. A later
-- try keeps its grant.
if (tonumber(read('GET', KEYS[3]) or '') or 0) > tonumber(ARGV[3]) then return 0 end
local owner, kind = unpack(read('HMGET', KEYS[1], 'owner', 'kind') or {}, 1, 2)
if owner == ARGV[2] and kind ~= 'cooling' and not ended(kind) then
  read('ZREM', KEYS[2], ARGV[1])
  redis.call('HSET', KEYS[1], 'owner', '')
end
return 1
"""
)
