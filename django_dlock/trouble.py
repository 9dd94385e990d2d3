"""Which locks an operator should look at first."""

from __future__ import annotations

from typing import Any

__all__ = ["NO_TROUBLE", "trouble"]

NO_TROUBLE = 6


def trouble(info: Any) -> int:
    """How soon an operator should look at a ``LeaseInfo``; the lower, the sooner.

    0: damaged. 1: its holder is dead. 2: its holder is silent. 3: its renewal is late. 4: somebody
    waits, and the holder's state is unknown. 5: somebody waits. 6: none of these.
    """
    state = info.holder_state
    if info.damaged:
        return 0
    if state in ("dead", "silent"):
        return 1 if state == "dead" else 2
    if info.is_late:
        return 3
    if info.waiting:
        return 4 if state == "unknown" else 5
    return NO_TROUBLE
