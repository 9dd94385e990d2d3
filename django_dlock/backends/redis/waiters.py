"""Who waits for a name, for operators; ``keys.py`` describes the queue."""

from __future__ import annotations

import json
import math
from typing import Any

from ...lease import Waiter
from ..holder_state import SILENT_AFTER
from ..operator_rows import waiter_row
from .commands import EXACTLY, Ask, as_it_is
from .keys import Keys
from .processes import StoredProcess, read_processes
from .scripts import LIST_WAITERS


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

    def waiter(request: str, arrival: str, process: str) -> Waiter:
        # Another program may have put in something else.
        owner, _ttl, _kind, _process, metadata = [*request.split("\n", 4), *("{}",) * 4][:5]
        of = stored.get(process) or StoredProcess()
        heard = _number(of.beat) / 1000
        return waiter_row(
            name=name,
            alias=alias,
            owner=owner.encode(*EXACTLY).decode("utf-8", "replace"),
            now=now,
            since=_number(arrival) / 1e6,
            process=of.identity,
            metadata=metadata,
            silent=now - abs(heard) > SILENT_AFTER,
            # Its subscription ends with the process, so it is as good as a heartbeat.
            listens=bool(of.listeners),
            deregistered=heard < 0,
            damaged=() if request.count("\n") >= 4 else ("request",),
        )

    return [waiter(*entry) for entry in found]


def _number(text: Any) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return 0.0
    return 0.0 if math.isnan(number) else number
