"""Who waits for a name, for operators; ``script_parts.py`` describes the queue."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Any

from ...lease import Waiter
from ..holder_state import (
    LONGEST,
    SILENT_AFTER,
    damaged,
    process_from_json,
    process_state,
    stored_object,
)
from .commands import EXACTLY, Command, Keys
from .script_parts import NOW, READ, Script

__all__ = ["read_waiters"]

# The answer is JSON, as that of a listing.
WAITERS = Script(
    READ
    + NOW
    + """
-- KEYS: waiters
-- ARGV: prefix of all keys, how many waiters to return at most
-- Returns {now ms, [[request, arrival in µs], ...], {process: [heartbeat and identity, number of
-- its subscriptions here], ...}}.
local found, processes = {}, {}
local queue = read('ZRANGE', KEYS[1], 0, tonumber(ARGV[2]) - 1, 'WITHSCORES') or {}
for i = 1, #queue, 2 do
  local process = string.match(queue[i], '^.-\\n.-\\n.-\\n(.-)\\n') or ''
  -- A huge request would take the time and the memory of everybody who reads the page.
  found[#found + 1] = {string.sub(queue[i], 1, LONGEST), queue[i + 1]}
  if not processes[process] then
    -- A user without the permission to ask must still see the waiters.
    local listeners = redis.pcall('PUBSUB', 'NUMSUB', ARGV[1] .. 'm:' .. process)[2] or 0
    local said = read('GET', ARGV[1] .. 'p:' .. process) or ''
    processes[process] = {string.sub(said, 1, LONGEST), listeners}
  end
end
return {moment, cjson.encode(found), cjson.encode(processes)}
""".replace("LONGEST", str(LONGEST))
)


def read_waiters(alias: str, keys: Keys, name: str, limit: int) -> Command[list[Waiter]]:
    """The command that reads the first ``limit`` waiters."""

    def read(answer: Any, sent_at: float) -> list[Waiter]:
        now, found, processes = int(answer[0]) / 1000, _json(answer[1], []), _json(answer[2], {})
        known = {
            process: _Process(said, listeners, now)
            for process, (said, listeners) in processes.items()
        }

        def waiter(request: str, arrival: str) -> Waiter:
            # Another program may have put in something else.
            owner, _ttl, _kind, process, metadata = [*request.split("\n", 4), *("",) * 4][:5]
            of = known.get(process) or _Process("", 0, now)
            facts, complete = stored_object(metadata), request.count("\n") >= 4
            # Never in the future, where it would be if the clock has stepped back.
            since = max(0.0, min(_number(arrival) / 1e6, now))
            return Waiter(
                name=name,
                alias=alias,
                owner=owner.encode(*EXACTLY).decode("utf-8", "replace"),
                since=dt.datetime.fromtimestamp(since, tz=dt.timezone.utc),
                waited=now - since,
                process=of.identity,
                state=of.state,
                metadata=facts.value,
                damaged=damaged(
                    request=not complete,
                    process=of.is_damaged,
                    metadata=complete and not facts.is_sound,
                ),
            )

        return [waiter(*entry) for entry in found] if limit > 0 else []

    return Command(WAITERS, [keys.waiters + name], [keys.base, max(1, limit)], read, name)


class _Process:
    """What the server knows of a waiter's process; empty if the process is not known."""

    def __init__(self, said: str, listeners: int, now: float) -> None:
        beat, _, identity = said.partition(" ")
        self.identity = process_from_json(identity)
        self.is_damaged = bool(identity) and self.identity is None
        heard = _number(beat) / 1000
        # Its subscription ends with the process, so it is as good as a heartbeat.
        silent = not listeners and now - abs(heard) > SILENT_AFTER
        self.state = process_state(self.identity, silent, deregistered=heard < 0)
        if listeners and self.identity is None:
            self.state = "alive"


def _number(text: Any) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return 0.0
    return 0.0 if math.isnan(number) else number


def _json(answer: bytes, empty: Any) -> Any:
    # An empty list and an empty object are the same for Lua.
    return json.loads(answer.decode(*EXACTLY)) or empty
