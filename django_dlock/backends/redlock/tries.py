"""How often an acquire under way was withdrawn.

A withdrawal may arrive late, on a connection that was given up since. The nodes tell it from those
of later tries of the same owner by its number; see ``scripts``.
"""

from __future__ import annotations

import math

from ... import clock
from ..redis.commands import LATE_BY

OWNERS_KEPT = 1000
"""Owners are remembered up to this number; then those are dropped for whom nothing can be late."""


class Tries:
    """By owner; for many threads."""

    def __init__(self) -> None:
        self._withdrawn: dict[str, tuple[int, float]] = {}
        self._prune_at = OWNERS_KEPT

    def number(self, owner: str) -> int:
        """How many tries of this owner were withdrawn; 0 for its first one."""
        return self._withdrawn.get(owner, (0, 0.0))[0]

    def withdraw(self, owner: str, number: int, ttl: float) -> None:
        """Note that this try is withdrawn."""
        self._withdrawn[owner] = number + 1, clock.now() + ttl + LATE_BY
        if len(self._withdrawn) >= self._prune_at:
            self._prune()

    def end(self, owner: str) -> None:
        """There will be no further try."""
        self._withdrawn.pop(owner, None)

    def _prune(self) -> None:
        now = clock.now()
        for owner, (_, until) in self._withdrawn.copy().items():
            if until < now:
                self.end(owner)
        self._prune_at = 2 * len(self._withdrawn) + OWNERS_KEPT


def late_ms(ttl: float) -> int:
    """For how long a withdrawal may still arrive."""
    return math.ceil(1000 * (ttl + LATE_BY))
