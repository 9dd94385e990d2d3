"""Who waits for a name, for operators; ``keys.py`` describes the queue."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Any

from ...lease import Waiter
from ..holder_state import (
    SILENT_AFTER,
    damaged,
    process_from_json,
    process_state,
    stored_object,
)
from .commands import EXACTLY, Ask, as_it_is
from .keys import Keys
from .processes import StoredProcess, read_processes
from .scripts import LIST_WAITERS

__all__ = ["read_waiters"]


def read_waiters(alias: str, keys: Keys, ask: Ask, name: str, limit: int) -> list[Waiter]:
    """The first ``limit`` waiters for a name."""
    if limit < 1:
        return []
    moment, answer = ask(LIST_WAITERS, [keys.waiters + name], [limit], as_it_is, name)
    now = int(moment) / 1000
    # An empty list and an empty object are the same for Lua.
    found = json.loads(answer.decode(*EXACTLY)) or []
    processes = list(dict.fromkeys(process for *_, process in found if process))
    stored = read_processes(ask, keys, processes) if processes else {}
    known = {process: _Process(said, now) for process, said in stored.items()}

    def waiter(request: str, arrival: str, process: str) -> Waiter:
        # Another program may have put in something else.
        owner, _ttl, _kind, _process, metadata = [*request.split("\n", 4), *("",) * 4][:5]
        of = known.get(process) or _Process(StoredProcess(), now)
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

    return [waiter(*entry) for entry in found]


class _Process:
    """What the server knows of a waiter's process; empty if the process is not known."""

    def __init__(self, stored: StoredProcess, now: float) -> None:
        self.identity = process_from_json(stored.identity)
        self.is_damaged = bool(stored.identity) and self.identity is None
        heard = _number(stored.beat) / 1000
        # Its subscription ends with the process, so it is as good as a heartbeat.
        silent = not stored.listeners and now - abs(heard) > SILENT_AFTER
        self.state = process_state(self.identity, silent, deregistered=heard < 0)
        if stored.listeners and self.identity is None:
            self.state = "alive"


def _number(text: Any) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return 0.0
    return 0.0 if math.isnan(number) else number
