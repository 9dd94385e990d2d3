"""The Lua code that the scripts of the Redis backend share; ``scripts.py`` has the scripts.

All keys share the tag ``{prefix:bucket}``, so that the keys of one lock are in one slot of a
cluster. After the tag comes ``FORMAT``, so that incompatible versions never share keys.

* ``…:l:<name>``: hash of one name. ``owner``; ``until`` and ``at`` in milliseconds and ``token`` in
  microseconds on the server's clock; ``ttl`` in milliseconds; ``kind``, or after the lease's end
  ``released`` or ``broken``; ``n``, the number of renewals, -1 for a lease that was handed over and
  that its owner has not used yet; ``short``, the last renewal for which the holder set a TTL, as
  ``<owner>:<number>``; ``proc``, the id of the holder's process; ``meta``, JSON; ``past``, earlier
  owners and how their leases ended, each as ``;<owner>:<first letter of the outcome>``, the latest
  first, with ``;+`` at the end if some were dropped; ``breaker``, the id of the last call that
  broke a lease. The key outlives the lease by its TTL, at least by a minute, to remember how it
  ended.
* ``…:q:<name>``: sorted set of waiters, in the order of their arrival. A member is the waiter's
  whole request: owner, TTL, kind, process id and metadata, one per line.
* ``…:i``: sorted set of the held names by token, and so in the order of their grants.
* ``…:p:<process>``: the last heartbeat of a process in milliseconds, and its identity as JSON; the
  time is negative after the process deregistered.
* ``…:clock``: the highest token so far. ``…:u:<owner>``: marks a request of which a copy may still
  be under way: ``1`` after it was cancelled, ``granted`` after it was granted.
* ``…:m:<process>``: the channel that a process subscribes to.

Numbers in messages and answers are formatted explicitly, because Lua's ``tostring`` keeps 14
digits and a token has 16. The server itself writes numbers in commands in full.

**Hand-over.** An acquire that finds a holder, and may wait, becomes a waiter; if it asks again, it
keeps its position. Release, cancel and break give the name to the first waiter in the same step:
owner, a new token and the waiter's own data are written to the hash, with the full TTL that it
asked for, and the message ``<owner> <token> <MAC>`` is sent to the channel of its process; see
``handover_mac.py``. If nobody
listens to that channel, the process is gone: the waiter is removed and the next one is tried. A
server that counts nobody although the process is subscribed says so when the process asks, which
then becomes no waiter, but asks again and again. If a process listens but does not react, the lease
expires; the next request then removes the other waiters of that process. The message ``<owner> 0``
means "ask again": a release with ``min_hold`` hands nothing over, but the name will be free earlier
than the waiter expects. An expired lease is not handed over; the next request gets the name.

**Keys.** A script touches only keys that its caller declares, so that it also runs on servers and
proxies that refuse others. What a script learns, such as the process of a holder, is read by the
next request: see ``processes.py``.

**Housekeeping.** Names whose lease has expired stay in the index until a script notices. Every
renewal, and now and then an acquire, returns 20 random names, which the next such call declares: it
removes the expired ones. As long as more than a quarter of them had expired, it returns four times
as many.
"""

from __future__ import annotations

import hashlib

__all__ = [
    "COMMON",
    "EXACT",
    "FORMAT",
    "GRANT",
    "HAND_OVER",
    "KNOWN_FOR_MS",
    "MEMORY_MS",
    "NOW",
    "READ",
    "SWEEP",
    "Script",
]

FORMAT = 2
"""Incremented with every change that scripts of an earlier version would misread."""


class Script:
    """Lua source, and the digest by which the server knows it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


MEMORY_MS = 60_000
"""The end of a lease is remembered for at least this long, or for its TTL if that is longer."""
KNOWN_FOR_MS = 86_400_000
"""How long the identity of a process is kept after its last heartbeat."""
MARGIN_MS = 20_000
"""How long a waiter that is late to ask again keeps its position."""
PAST_BYTES = 512
"""Room for the ends of about 14 leases. Beyond that, releases are dropped first."""

EXACT = 2**53
"""From here on Lua's numbers are not exact; our times and tokens are smaller."""

# Another program may have put a value of another type in the place of a key. A script that reads
# many keys must not end at one of them.
READ = """
-- The reply; nil if the key has another type.
local function read(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  -- Any other error reaches the caller as it is.
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then redis.call(...) end
end
-- Adds to a sorted set, in the place of a value of another type if there is one.
local function add(key, ...)
  if read('ZADD', key, ...) == nil then
    -- It ends at once. For this the user needs no other right.
    redis.call('SET', key, '', 'PXAT', '1')
    redis.call('ZADD', key, ...)
  end
end
-- As one of the lines of an answer.
local function line(field) return (string.gsub(field, '[\\r\\n]', ' ')) end
"""

# The server's time in µs and in ms, as text, and in ms as a number. Texts are cut and joined if
# possible, because formatting a number takes as long as a command.
NOW = """
local time = redis.call('TIME')
local micros = time[1] .. string.sub('000000' .. time[2], -6)
local moment = string.sub(micros, 1, -4)
local now = tonumber(moment)
"""

# ``lives`` tells whether a hash has a present lease. A lease without an end, or with one that is
# not a number, was damaged by another program. It counts as present until an operator breaks it.
COMMON = (
    READ
    + NOW
    + f"""
local function text(number) return string.format('%.0f', number) end
-- Another program may have written a value that is not a number, or one that no command accepts.
local function whole(field)
  local number = tonumber(field)
  return number and number > -{EXACT} and number < {EXACT} and math.floor(number) or nil
end
local function memory(ttl) return math.max(whole(ttl) or 0, {MEMORY_MS}) end
local function ended(kind) return kind == 'released' or kind == 'broken' end
local function lives(owner, till, kind)
  return owner and owner ~= '' and not ended(kind) and (whole(till) or math.huge) > now
end
-- How a lease that is not present ended.
local function end_of(kind)
  return ended(kind) and kind or kind == 'cooling' and 'released' or 'expired'
end
-- How the lease of an earlier owner ended.
local function end_before(past, owner)
  local _, found = string.find(past or '', ';' .. owner .. ':', 1, true)
  local letter = found and string.match(past, '^([rbe]);', found + 1)
  return letter and ({{r = 'released', b = 'broken', e = 'expired'}})[letter]
end
"""
)

# Scripts that grant or end a lease have these keys in this order: lock, waiters, index, clock.
GRANT = f"""
-- A new token: higher than all earlier ones, so that tokens rise even if the clock steps back, and
-- at least the clock's time, so that they rise even if the server has lost its data.
local function above(token)
  local new, least = micros, tonumber(token)
  if least and least >= tonumber(new) and least < {EXACT} then
    new = string.format('%.0f', least + 1)
  end
  local before = read('SET', KEYS[4], new, 'GET')
  if before == nil then redis.call('SET', KEYS[4], new) end
  least = tonumber(before)
  if least and least >= tonumber(new) and least < {EXACT} then
    new = string.format('%.0f', least + 1)
    redis.call('SET', KEYS[4], new)
  end
  return new
end
-- Adds ``last``, the previous owner, and the letter of how its lease ended. A repeated release and
-- a late copy of an acquire find it there.
local function remember(past, last, letter)
  if not last or last == '' then return past or '' end
  past = ';' .. last .. ':' .. letter .. (past and past ~= '' and past or ';')
  if #past <= {PAST_BYTES} then return past end
  local kept = string.match(string.sub(past, 1, {PAST_BYTES * 3 // 4}), '^.*;') or ';'
  for lost in string.gmatch(string.sub(past, #kept + 1), '[^;]*:[be];') do
    if #kept + #lost < {PAST_BYTES} then kept = kept .. lost end
  end
  return kept .. '+'
end
local function grant(name, owner, token, ttl, kind, proc, meta, n, past)
  redis.call('HSET', KEYS[1], 'owner', owner, 'until', now + ttl, 'kind', kind, 'token', token,
    'ttl', ttl, 'at', moment, 'n', n, 'proc', proc, 'meta', meta, 'past', past)
  -- Exactly as long after ``until`` as RELEASE relies on, however long this script takes.
  redis.call('PEXPIREAT', KEYS[1], now + ttl + math.max(ttl, {MEMORY_MS}))
  add(KEYS[3], token, name)
end
"""

# Hands the name over to the first waiter whose process listens; sets ``handed`` if there is one.
# Needs ``name``; ``secret``, the key for MACs or ''; of the previous lease, if there was one:
# ``token``, ``last`` (its owner), ``letter`` (how it ended) and ``past``; and the first waiter,
# ``waiter`` and ``since``, if known.
# If ``cools`` is set, all waiters are notified to ask again and keep their positions, because any
# of them may give up before the name is free.
HAND_OVER = f"""
local handed, gone, channels = false, {{}}, string.sub(KEYS[1], 1, -3 - #name) .. 'm:'
local function first() return unpack(read('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES') or {{}}) end
if not waiter then waiter, since = first() end
for _, each in ipairs(cools and read('ZRANGE', KEYS[2], 0, -1) or {{}}) do
  local owner, proc = string.match(each, '^(.-)\\n.-\\n.-\\n(.-)\\n')
  if owner then redis.pcall('PUBLISH', channels .. proc, owner .. ' 0') end
end
while waiter and not (handed or cools) do
  local owner, ttl, kind, proc, meta = string.match(waiter, '^(.-)\\n(.-)\\n(.-)\\n(.-)\\n(.*)$')
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
  redis.call('ZREM', KEYS[2], waiter)
  if listeners > 0 then
    local new = above(token)
    local message = owner .. ' ' .. new
    if secret ~= '' then
      message = message .. ' ' .. redis.sha1hex(
        secret .. redis.sha1hex(secret .. channels .. proc .. ' ' .. message))
    end
    local heard = redis.pcall('PUBLISH', channels .. proc, message)
    if type(heard) ~= 'number' then
      redis.call('ZADD', KEYS[2], since, waiter)
      redis.call('PEXPIRE', KEYS[2], '{MARGIN_MS}')
      break
    end
    -- Even if the server says that nobody has received it: whoever has relies on this grant.
    handed = true
    grant(name, owner, new, ttl, kind, proc, meta, '-1', remember(past, last, letter))
  else
    gone[proc or ''] = true
    waiter, since = first()
  end
end
"""

SWEEP = """
-- Removes from the index the names of the last keys, from ``first``, that are free. ``base`` is the
-- prefix of all keys. Returns how many those were.
local function clean(first, index, base)
  local dead = 0
  for i = first, #KEYS do
    local l = read('HMGET', KEYS[i], 'owner', 'until', 'kind')
    if l and not lives(l[1], l[2], l[3])
      and (ended(l[3]) or redis.call('PTTL', KEYS[i]) ~= -1) then
      dead = dead + (read('ZREM', index, string.sub(KEYS[i], #base + 3)) or 0)
    end
  end
  return dead
end
-- Does the same; returns the answer and the names to check next, at most ``most``.
local function swept(answer, first, index, base, most)
  local checked, size = #KEYS - first + 1, 20
  if clean(first, index, base) * 4 > checked then size = math.min(checked * 4, most) end
  return {answer, unpack(read('ZRANDMEMBER', index, size) or {})}
end
"""
