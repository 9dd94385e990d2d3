"""The Lua that the Redis backend runs; each script is one atomic step.

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
    "ACQUIRE",
    "BREAK",
    "COMMON",
    "EXACT",
    "FATES",
    "GOODBYE",
    "HANDED_MS",
    "LAST_END",
    "LOCKED",
    "MEMORY_MS",
    "RELEASE",
    "RENEW",
    "UNDO",
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
_WAITER_MS = 10_000
"""A waiter that has not asked for so long is forgotten."""

EXACT = 2**53
"""From here on numbers are not exact, nor times or tokens of ours."""

# The server's time in µs and in ms, as text, and in ms as a number. Texts are cut and joined where
# they can be: to format a number costs as much as a command.
_NOW = f"""
local time = redis.call('TIME')
local micros = time[1] .. string.sub('000000' .. time[2], -6)
local moment = string.sub(micros, 1, -4)
local now = tonumber(moment)
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
_LIVES = """
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
COMMON = _NOW + _LIVES

# Scripts that grant or end a lease have these keys in this order: lock, waiters, index, clock.
_GRANT = f"""
-- Above all that the bucket has given out, so that tokens rise when the clock steps back; above
-- the clock, so that they rise when the server has lost its data.
local function above(token)
  local new, least = micros, tonumber(token)
  if least and least >= tonumber(new) and least < {EXACT} then new = text(least + 1) end
  least = tonumber(redis.call('SET', KEYS[4], new, 'GET'))
  if least and least >= tonumber(new) and least < {EXACT} then
    new = text(least + 1)
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

# Takes away before it adds, for a server out of memory, see RENEW. The key's TTL is long enough:
# whatever sets the end of a lease sets that of the key, ``memory`` later.
_FREE = """
  redis.call('ZREM', KEYS[3], ARGV[1])
  redis.call('HSET', KEYS[1], 'kind', how)
"""

_END = f"""
-- Nobody asks about more than the last ten.
local function with_end(owner, how, past)
  local ends = ';' .. owner .. ':' .. how .. (past or '')
  return #ends > 512 and string.match(string.sub(ends, 1, 512), '^(.*);') or ends
end
-- The first waiter whose process receives what ``letter`` says to it, and what it asks for.
local function reach(requests, letter)
  local gone = {{}}
  while true do
    local owner = redis.call('ZPOPMIN', KEYS[2])[1]
    if not owner then return end
    local asked = redis.call('GETDEL', requests .. owner)
    asked = asked and cmsgpack.unpack(asked)
    local mailbox = asked and asked[1]
    if asked and not gone[mailbox] then
      -- Looked up before: what nobody receives here, a replica may pass on to one who still
      -- listens to a former master. Who may not do either shall be able to release all the same.
      local listeners = redis.pcall('PUBSUB', 'NUMSUB', mailbox)[2]
      local heard = listeners and listeners > 0
        and redis.pcall('PUBLISH', mailbox, owner .. ' ' .. letter(asked))
      if type(heard) == 'number' and heard > 0 then return owner, asked end
      gone[mailbox] = true
    end
  end
end
-- ``token`` of the lease before, ``last`` its owner, if there was one, and ``how`` it ended.
local function hand_over(requests, name, token, last, how, past)
  local new, ttl, forget
  local owner, asked = reach(requests, function(asked)
    -- Nearly all ask for more, and there is nothing to be formatted.
    new, ttl, forget = new or above(token), '{HANDED_MS}', '{HANDED_MS + MEMORY_MS}'
    if asked[2] < {HANDED_MS} then
      ttl, forget = text(asked[2]), text(asked[2] + memory(asked[2]))
    end
    return new .. ' ' .. ttl
  end)
  if not owner then return false end
  local kind, proc, meta = unpack(asked, 3)
  if last then
    -- A release whose reply was lost is repeated when others have had the name since.
    grant(name, owner, new, ttl, forget, kind, proc, meta, 'past', with_end(last, how, past))
  else
    grant(name, owner, new, ttl, forget, kind, proc, meta)
  end
  return true
end
local function finish(requests, name, token, owner, how, past)
  if hand_over(requests, name, token, owner, how, past) then return end
  -- Somebody took it away, and nobody would see the key any more.
  if redis.call('PTTL', KEYS[1]) == -1 then redis.call('PEXPIRE', KEYS[1], {MEMORY_MS}) end
{_FREE}
end
"""

ACQUIRE = Script(
    _NOW
    + _GRANT
    + """
-- KEYS: see above, then mark of an attempt that was taken back, what this one asks for
-- ARGV: name, owner, ttl ms, kind, process JSON, metadata, mailbox of one who will wait or '',
--   owner that may be replaced or '', ms until a key with this TTL goes
-- Returns the token, or lines of what is in the way: kind, remaining ms, now ms, token, process
-- JSON, owner. One text, for to read it takes a client as long as each part of a list.
local name, me, mailbox = ARGV[1], ARGV[2], ARGV[7]
local owner, kind, token, last = unpack(
  redis.call('HMGET', KEYS[1], 'owner', 'kind', 'token', 'last'), 1, 4)
local known = redis.call('EXISTS', KEYS[5], KEYS[6]) > 0
-- The usual case: nobody has it, and nobody has heard of this attempt.
if not known and (not owner or owner ~= me and (kind == 'released' or kind == 'broken')
  and not (last and string.find(last, me, 1, true))) then
  local new = above(token)
  if owner then
    grant(name, me, new, ARGV[3], ARGV[9], ARGV[4], ARGV[5], ARGV[6],
      'last', owner .. ':' .. kind)
  else
    grant(name, me, new, ARGV[3], ARGV[9], ARGV[4], ARGV[5], ARGV[6])
  end
  return tonumber(new)
end
"""
    + _LIVES
    + f"""
local ttl = tonumber(ARGV[3])
local till, proc, longest, past = unpack(
  redis.call('HMGET', KEYS[1], 'until', 'proc', 'ttl', 'past'), 1, 4)
till, longest = whole(till), whole(longest)
local living = lives(owner, till, kind)
local undone = known and redis.call('EXISTS', KEYS[5]) == 1
if known then
  if mailbox == '' or not living or undone then redis.call('ZREM', KEYS[2], me) end
  redis.call('DEL', KEYS[6])
end

if living and owner == me and kind ~= 'cooling' and not undone then
  -- One that was handed over has less than it asked for.
  local new = math.max(till or 0, now + ttl)
  redis.call('HSET', KEYS[1], 'until', new, 'ttl', math.max(longest or 0, ttl))
  redis.call('PEXPIRE', KEYS[1], new - now + memory(ttl))
  return tonumber(token) or 0
end
if living and owner == ARGV[8] and kind ~= 'cooling' and not undone then
  living, kind = false, 'released'
end
-- The late packet of an attempt whose lease was given back or broken since must not revive it.
local over = not living and ended(owner == me and end_of(kind) or end_before(last, past, me))
if living or undone or over then
  if not living then return table.concat({{'held', '0', moment, token or '0', '', ''}}, '\\n') end
  local remaining = till and till - now or 10000
  -- An end beyond the lease's own TTL comes of a clock that has stepped back: nobody shall wait
  -- for as long as the step.
  if till and longest and longest > 0 and remaining > longest and kind ~= 'cooling' then
    remaining = longest
    redis.call('HSET', KEYS[1], 'until', now + longest)
    redis.call('PEXPIRE', KEYS[1], longest + memory(longest))
  end
  if mailbox ~= '' and not undone then
    if redis.call('ZADD', KEYS[2], 'NX', micros, me) == 0 then
      -- Little by little those go who are forgotten.
      local requests = string.sub(KEYS[6], 1, -1 - #me)
      for _, other in ipairs(redis.call('ZRANDMEMBER', KEYS[2], 3)) do
        if other ~= me and redis.call('EXISTS', requests .. other) == 0 then
          redis.call('ZREM', KEYS[2], other)
        end
      end
    end
    redis.call('PEXPIRE', KEYS[2], '{2 * _WAITER_MS}')
    local request = {{mailbox, ttl, ARGV[4], ARGV[5], ARGV[6]}}
    redis.call('SET', KEYS[6], cmsgpack.pack(request), 'PX', '{_WAITER_MS}')
  end
  return table.concat(
    {{kind or 'held', text(remaining), moment, token or '0', proc or '', owner}}, '\\n')
end

local new = above(token)
if owner and owner ~= me then
  grant(name, me, new, ttl, ARGV[9], ARGV[4], ARGV[5], ARGV[6],
    'last', owner .. ':' .. end_of(kind))
else
  grant(name, me, new, ttl, ARGV[9], ARGV[4], ARGV[5], ARGV[6])
end
return tonumber(new)
"""
)

RELEASE = Script(
    f"""
-- KEYS: see above
-- ARGV: name, owner, min_hold ms, prefix of what waiters ask for
-- Returns 1 where it is released now, else the fate.
-- The usual case: nobody waits. A lease lives while its key has more than ``memory`` left, which
-- costs less to ask than the time. A TTL that is none goes the long way, as does a key without.
if ARGV[3] == '0' and redis.call('EXISTS', KEYS[2]) == 0 then
  local owner, kind, ttl = unpack(redis.call('HMGET', KEYS[1], 'owner', 'kind', 'ttl'))
  local how = 'released'
  if owner == ARGV[2] and kind ~= 'cooling' and kind ~= 'released' and kind ~= 'broken'
    and redis.call('PTTL', KEYS[1]) > math.max(tonumber(ttl) or math.huge, {MEMORY_MS}) then
{_FREE}
    return 1
  end
end
"""
    + COMMON
    + _GRANT
    + _END
    + """
local owner, till, kind, token, last, past = unpack(
  redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'token', 'last', 'past'), 1, 6)
local me = ARGV[2]
if owner ~= me then return end_before(last, past, me) or 'refused' end
if not lives(owner, till, kind) or kind == 'cooling' then return end_of(kind) end
local ttl, at = nil, 0
if ARGV[3] ~= '0' then ttl, at = unpack(redis.call('HMGET', KEYS[1], 'ttl', 'at'), 1, 2) end
-- The clock may have stepped back since the grant: then from now, or the name would stay taken
-- for as long as the step.
local cool = math.min(whole(at) or 0, now) + tonumber(ARGV[3])
if cool > now then
  -- In this order for a server out of memory, see RENEW.
  redis.call('PEXPIRE', KEYS[1], cool - now + memory(ttl))
  redis.call('HSET', KEYS[1], 'kind', 'cooling', 'until', cool)
  reach(ARGV[4], function() return '0 0' end)
else
  finish(ARGV[4], ARGV[1], token, me, 'released', past)
end
return 1
"""
)

UNDO = Script(
    COMMON
    + _GRANT
    + _END
    + """
-- KEYS: see above, then the mark of an attempt that was taken back, what it asks for
-- ARGV: name, owner, ms for which the attempt cannot be granted any more, prefix as in RELEASE
-- In this order for a server out of memory, see RENEW.
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[6])
redis.call('SET', KEYS[5], '1', 'PX', ARGV[3])
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'token', 'past')
local owner, till, kind, token, past = unpack(l, 1, 5)
if not lives(owner, till, kind) then
  hand_over(ARGV[4], ARGV[1], token, owner, owner and end_of(kind), past)
elseif owner == ARGV[2] and kind ~= 'cooling' then
  finish(ARGV[4], ARGV[1], token, owner, 'released', past)
end
"""
)

BREAK = Script(
    COMMON
    + _GRANT
    + _END
    + """
-- KEYS: see above
-- ARGV: name, owner, prefix as in RELEASE
-- Returns 1, or 0 where the owner does not have it.
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind', 'ttl', 'token', 'past')
local owner, till, kind, ttl, token, past = unpack(l, 1, 6)
if owner ~= ARGV[2] or ended(kind) then return 0 end
if not lives(owner, till, kind) and redis.call('PTTL', KEYS[1]) ~= -1 then return 0 end
-- It may have none.
redis.call('PEXPIRE', KEYS[1], memory(ttl))
finish(ARGV[3], ARGV[1], token, owner, 'broken', past)
return 1
"""
)

FATES = {
    "n": "renewed",
    "r": "released",
    "e": "expired",
    "b": "broken",
    "f": "refused",
}
"""What the letters of ``RENEW``'s answer mean."""

RENEW = Script(
    COMMON
    + """
-- KEYS: beats, index, lock...
-- ARGV: process id, prefix of lock keys, the owner of each lock, then the TTL in ms of each or one
--   for all
-- Returns one letter per lock, see FATES.
local day = 86400000
-- First, because a server out of memory refuses ``ZADD`` and ``HSET`` until the script has
-- written something that takes no memory: it grants nothing more, but what is held is renewed.
redis.call('ZREMRANGEBYSCORE', KEYS[1], text(day - now), text(now - day))
redis.call('ZADD', KEYS[1], text(now), ARGV[1])
local letters = {released = 'r', expired = 'e', broken = 'b'}
local call, locks, fates = redis.call, #KEYS - 2, {}
local asked, ttl, ends, forget
for i = 1, locks do
  if i == 1 or #ARGV > locks + 3 then
    -- Once for all where it is the same: half the work of a lock is to format numbers.
    asked = ARGV[2 + locks + i]
    ttl = tonumber(asked)
    ends, forget = text(now + ttl), text(ttl + memory(ttl))
  end
  local lock, me = KEYS[2 + i], ARGV[2 + i]
  local l = call('HMGET', lock, 'owner', 'until', 'kind', 'n', 'ttl')
  local owner, till, kind, n, before = l[1], l[2], l[3], l[4], l[5]
  if owner ~= me then
    local before = call('HMGET', lock, 'last', 'past')
    fates[i] = letters[end_before(before[1], before[2], me)] or 'f'
  elseif kind == 'cooling' or not lives(owner, till, kind) then
    fates[i] = letters[end_of(kind)]
  else
    local left = (whole(till) or now) - now
    n = (whole(n) or 0) + 1
    if left > ttl and left <= (whole(before) or 0) then
      -- One that was sent earlier, for a shorter time, arrives later: it takes nothing away. An
      -- end beyond the TTL comes of a clock that has stepped back, and is put right.
      call('HSET', lock, 'ttl', text(left), 'n', n)
      call('PEXPIRE', lock, text(left + memory(left)))
    else
      call('HSET', lock, 'until', ends, 'ttl', asked, 'n', n)
      call('PEXPIRE', lock, forget)
    end
    fates[i] = 'n'
  end
end
-- Names whose lease ended unseen leave the index little by little.
local some = call('ZRANDMEMBER', KEYS[2], 3)
for _, name in ipairs(some) do
  local l = call('HMGET', ARGV[2] .. name, 'owner', 'until', 'kind')
  if not lives(unpack(l, 1, 3)) and (ended(l[3]) or call('PTTL', ARGV[2] .. name) ~= -1) then
    call('ZREM', KEYS[2], name)
  end
end
return table.concat(fates)
"""
)

LOCKED = Script(
    COMMON
    + """
-- KEYS: lock
local l = redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind')
return lives(unpack(l, 1, 3)) and 1 or 0
"""
)

LAST_END = Script(
    COMMON
    + """
-- KEYS: lock
-- Returns {owner, fate} or nothing.
local owner, till, kind = unpack(redis.call('HMGET', KEYS[1], 'owner', 'until', 'kind'), 1, 3)
return owner and owner ~= '' and not lives(owner, till, kind) and {owner, end_of(kind)}
"""
)

GOODBYE = Script(
    COMMON
    + """
-- KEYS: beats
-- ARGV: process id
redis.call('ZADD', KEYS[1], -now, ARGV[1])
"""
)
