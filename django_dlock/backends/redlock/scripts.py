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

from pathlib import Path

from ..redis.lua_source import CONSTANTS, Script, code
from ..redis.scripts import ACQUIRE, LIST_LEASES, LIST_NAMES, LOCKED

KEPT_OUT = "KEPTOUT"
"""The error code of a node that is kept out."""

_LUA = Path(__file__).parent / "lua"
_GUARD = code(_LUA / "guard.lua", {**CONSTANTS, "KEPT_OUT": KEPT_OUT})
_NEXT_TRY = code(_LUA / "next_try.lua")

GUARDED = {
    script: Script(f"{_GUARD}\n{script.source}")
    for script in (ACQUIRE, LOCKED, LIST_NAMES, LIST_LEASES)
}
"""The scripts that a node refuses while it is kept out."""

ACQUIRE_AGAIN = Script(f"{_NEXT_TRY}\n{GUARDED[ACQUIRE].source}")
"""``ACQUIRE`` by an owner whose earlier try was withdrawn; guarded like the others."""

RAISE_TOKEN = Script(code(_LUA / "raise_token.lua"))
WITHDRAW = Script(code(_LUA / "withdraw.lua"))
