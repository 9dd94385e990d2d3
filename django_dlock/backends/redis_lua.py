"""The Lua that the scripts of the Redis backend share; ``redis_scripts.py`` has the scripts.

Keys of a bucket share the tag ``{prefix:bucket}``, so that all keys of one lock lie in one slot:

* ``…:l:<name>`` hash of one name. ``owner``; ``until`` and ``at`` in milliseconds and ``token`` in
  microseconds on the server's clock; ``ttl`` in milliseconds; ``kind``, and after its end
  ``released`` or ``broken``; ``n`` renewals; ``proc`` the holder's process and ``meta``, both JSON;
  ``last`` the owner before, if its lease ended before this one was asked for, and how, as
  ``<owner>:<how>``; ``past`` those who handed it over, ``;<owner>:<how>`` of each, the last one
  first. The key outlives the lease by a TTL, at least a minute, for the memory of its end.
* ``…:q:<name>`` sorted set of waiters by when they came; ``…:w:<owner>`` what a waiter asks for,
  gone when it is to be forgotten.
* ``…:index`` sorted set of the names that are held, by token, so in order of their grant.
* ``…:beats`` sorted set of processes by when they were last heard of; negative after a goodbye.
* ``…:clock`` the highest token given out; ``…:u:<owner>`` an attempt that was taken back.

* ``…:m:<process>:<number>`` channel to which a process listens: a mailbox.

Numbers in letters and answers are formatted by hand: Lua's ``tostring`` keeps 14 digits, a token
has 16. Those in commands the server writes out in full.

**Hand-over.** An acquire that names a mailbox and meets a holder becomes a waiter; one that asks
again keeps its place. Release, undo and break give the name to the waiter that came first, in the
same step: owner, a new token and the waiter's own facts go into the hash, with a TTL of 2 s at the
most, and the letter ``<owner> <token> <ttl in ms>`` goes to its mailbox. A mailbox to which nobody
listens shows that the waiter's process is not there: the waiter is forgotten and the next one is
tried, so the dead cost nothing. One that is there and does nothing costs the 2 s. The waiter's
next command is a renewal, or an acquire that finds its own grant and prolongs it; see
``redis_mailbox.py`` for which. The letter ``<owner> 0 0`` says "ask again": a release under
``min_hold`` hands nothing over, but the name will be free earlier than the waiter knows. Nor does
a lease that expires: the name then goes to whoever asks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

__all__ = [
    "COMMON",
    "EXACT",
    "FREE",
    "GRANT",
    "HANDED_MS",
    "HAND_OVER",
    "LIVES",
    "MEMORY_MS",
    "NOW",
    "NUMBERS",
    "STAND_IN_LINE",
    "WAITER_MS",
    "Script",
]


@dataclass(frozen=True)
class Script:
    """Lua source and the digest by which the server knows it."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


MEMORY_MS = 60_000
"""For so long at the least it is remembered after its end how a lease ended; else for its TTL."""
HANDED_MS = 2000
"""For so long at the most a lease is handed over; its holder prolongs it."""
WAITER_MS = 10_000
"""A waiter that has not asked for so long is forgotten."""

EXACT = 2**53
"""From here on numbers are not exact, nor times or tokens of ours."""

# The server's time in µs and in ms, as text, and in ms as a number. Texts are cut and joined where
# they can be: to format a number costs as much as a command. So does a function that is defined
# and not called: what is on everybody's path is written without.
NOW = """
local time = redis.call('TIME')
local micros = time[1] .. string.sub('000000' .. time[2], -6)
local moment = string.sub(micros, 1, -4)
local now = tonumber(moment)
"""

NUMBERS = f"""
local function text(number) return string.format('%.0f', number) end
-- A stranger may have written what is no number, or none that a command takes.
local function whole(field)
  local number = tonumber(field)
  return number and number > -{EXACT} and number < {EXACT} and math.floor(number) or nil
end
local function memory(ttl) return math.max(whole(ttl) or 0, {MEMORY_MS}) end
"""

# Whether a hash's lease lives. One without an end, or with one that is no time, counts as living:
# somebody tampered with it, and only an operator may say that it is over.
LIVES = """
local function ended(kind) return kind == 'released' or kind == 'broken' end
local function lives(owner, till, kind)
  return owner and owner ~= '' and not ended(kind) and (whole(till) or math.huge) > now
end
-- Of one that does not live.
local function end_of(kind)
  return ended(kind) and kind or kind == 'cooling' and 'released' or 'expired'
end
-- How the lease of one ended who is not the owner any more.
local function end_before(last, past, owner)
  local ends = ';' .. (last or '') .. (past or '')
  local _, found = string.find(ends, ';' .. owner .. ':', 1, true)
  return found and string.match(ends, '^%a+', found + 1)
end
"""
COMMON = NOW + NUMBERS + LIVES

# Scripts that grant or end a lease have these keys in this order: lock, waiters, index, clock.
GRANT = f"""
-- Above all that the bucket has given out, so that tokens rise when the clock steps back; above
-- the clock, so that they rise when the server has lost its data.
local function above(token)
  local new, least = micros, tonumber(token)
  if least and least >= tonumber(new) and least < {EXACT} then
    new = string.format('%.0f', least + 1)
  end
  least = tonumber(redis.call('SET', KEYS[4], new, 'GET'))
  if least and least >= tonumber(new) and least < {EXACT} then
    new = string.format('%.0f', least + 1)
    redis.call('SET', KEYS[4], new)
  end
  return new
end
-- ``forget``: ms until the key goes. Further fields of the hash may follow.
local function grant(name, owner, token, ttl, forget, kind, proc, meta, ...)
  redis.call('HSET', KEYS[1], 'owner', owner, 'until', now + ttl, 'kind', kind,
    'token', token, 'ttl', ttl, 'at', moment, 'n', '0', 'proc', proc, 'meta', meta, ...)
  redis.call('PEXPIRE', KEYS[1], forget)
  redis.call('ZADD', KEYS[3], token, name)
end
"""

# ``me`` asks to be told at ``mailbox``; see ACQUIRE for the arguments.
STAND_IN_LINE = f"""
    if redis.call('ZADD', KEYS[2], 'NX', micros, me) == 0 then
      -- Little by little those go who are forgotten.
      local requests = string.sub(KEYS[6], 1, -1 - #me)
      for _, other in ipairs(redis.call('ZRANDMEMBER', KEYS[2], 3)) do
        if other ~= me and redis.call('EXISTS', requests .. other) == 0 then
          redis.call('ZREM', KEYS[2], other)
        end
      end
    end
    redis.call('PEXPIRE', KEYS[2], '{2 * WAITER_MS}')
    local request = {{mailbox, tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]}}
    redis.call('SET', KEYS[6], cmsgpack.pack(request), 'PX', '{WAITER_MS}')
"""

# Takes away before it adds, for a server out of memory, see RENEW. The key's TTL is long enough:
# whatever sets the end of a lease sets that of the key, ``memory`` later.
FREE = """
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('HSET', KEYS[1], 'kind', how)
"""

# To the first waiter whose process receives what is said; ``handed`` is whether there is one. It
# needs ``name``, ``requests`` (the prefix of what waiters ask for), ``token`` of the lease before,
# ``last`` its owner, if there was one, ``how`` it ended and its ``past``; and ``first``: the waiter
# that came first, where it is out of the line already. Where ``told`` is set, a letter like it goes
# to the waiter, and nothing else.
HAND_OVER = f"""
local handed, new, gone = false, nil, {{}}
repeat
  local waiter = first or redis.call('ZPOPMIN', KEYS[2])[1]
  first = nil
  local asked = waiter and redis.call('GETDEL', requests .. waiter)
  asked = asked and cmsgpack.unpack(asked)
  local mailbox = asked and asked[1]
  if asked and not gone[mailbox] then
    -- Looked up before: what nobody receives here, a replica may pass on to one who still
    -- listens to a former master. Who may not do either shall be able to release all the same.
    local listeners = redis.pcall('PUBSUB', 'NUMSUB', mailbox)[2]
    if listeners and listeners > 0 then
      -- Nearly all ask for more, and there is nothing to be formatted.
      local ttl, forget = '{HANDED_MS}', '{HANDED_MS + MEMORY_MS}'
      if asked[2] < {HANDED_MS} then
        ttl = string.format('%.0f', asked[2])
        forget = string.format('%.0f', asked[2] + {MEMORY_MS})
      end
      new = new or told or above(token)
      local heard = redis.pcall('PUBLISH', mailbox,
        waiter .. ' ' .. (told or new .. ' ' .. ttl))
      handed = type(heard) == 'number' and heard > 0
      if handed and not told then
        if last then
          -- A release whose reply was lost is repeated when others have had the name since;
          -- nobody asks about more than the last ten.
          past = ';' .. last .. ':' .. how .. (past or '')
          if #past > 512 then past = string.match(string.sub(past, 1, 512), '^(.*);') end
          grant(name, waiter, new, ttl, forget, asked[3], asked[4], asked[5], 'past', past)
        else
          grant(name, waiter, new, ttl, forget, asked[3], asked[4], asked[5])
        end
      end
    end
    gone[mailbox] = true
  end
until handed or not waiter
"""
