"""Looking for a reply before sleeping until it comes: adaptive spinning, as in mutexes.

Who sleeps must be woken, and often his processor, too. Where the server is near, that takes longer
than its answer. So a thread looks for a moment first, and lets others who want its processor go
before; where replies do not come that fast it soon stops doing so, but for a try now and then.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Any

__all__ = ["MOST_LEFT_OUT", "Spin"]

MOST_LEFT_OUT = 63
"""Replies for which nobody looks ahead, between two tries where they are slow."""


def _go_on() -> None:
    """Where a thread cannot let others go before."""


_let_others: Callable[[], None] = getattr(os, "sched_yield", _go_on)


class Spin:
    """How long to look for a reply, learnt from the replies before.

    Its memory is shared by all threads without a lock: it is only a guess.

    Args:
        limit: Seconds; 0 for never.
    """

    __slots__ = ("_leave_out", "_left_out", "_limit")

    def __init__(self, limit: float) -> None:
        # Windows has no poll. That of gevent and eventlet is not the system's, and while one of
        # their greenlets looks no other runs.
        known = getattr(getattr(select, "poll", None), "__module__", "") == "select"
        self._limit = limit if known else 0.0
        self._leave_out = self._left_out = 0

    def look(self, connection: Any) -> None:
        """Return once something can be read, or the moment is over."""
        if self._left_out < self._leave_out:
            self._left_out += 1
            return
        # Not a part of redis-py's public face, which cannot look without reading.
        sock = getattr(connection, "_sock", None)
        if sock is None or not self._limit:
            return
        poll = select.poll()
        try:
            poll.register(sock, select.POLLIN)
        except (OSError, TypeError, ValueError):
            # Closed, or none of the system's; whoever reads will say so.
            return
        # Perhaps the server itself wants this processor.
        _let_others()
        if not poll.poll(0):
            give_up_at = time.perf_counter() + self._limit
            while not poll.poll(0):
                # Once more: the last look may have let other threads of this process go before.
                if time.perf_counter() > give_up_at and not poll.poll(0):
                    self._leave_out = min(2 * self._leave_out + 1, MOST_LEFT_OUT)
                    self._left_out = 0
                    return
                _let_others()
        self._leave_out = 0
