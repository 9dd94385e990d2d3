"""Looking for a reply before sleeping until it comes: adaptive spinning, as in mutexes.

Who sleeps must be woken, and often his processor, too. Where the server is near, that takes longer
than its answer. So a thread looks for a moment first, and lets others who want its processor go
before; where replies do not come that fast it soon stops doing so, but for a try now and then.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["MOST_LEFT_OUT", "Spin"]

MOST_LEFT_OUT = 63
"""Replies for which nobody looks ahead, between two tries where they are slow."""


def _go_on() -> None:
    """Where a thread cannot let others go before."""


_let_others: Callable[[], None] = getattr(os, "sched_yield", _go_on)

LET_GO_FOR = 0.0015
"""Seconds that those who go before may take, in which the server serves a few of them; where
processors are busy, each takes a slice of several milliseconds."""


class _Polls(threading.local):
    """What each thread looks with, for none may be used by two at once.

    To make one takes longer than to use it. It knows a socket by the number of its descriptor only,
    and serves the next one with that number as well.
    """

    def __init__(self) -> None:
        self.by_number: dict[int, Callable[[int], object]] = {}


class Spin:
    """How long to look for a reply, learnt from the replies before.

    Its memory is shared by all threads without a lock: it is only a guess.

    Args:
        limit: Seconds; 0 for never.
    """

    __slots__ = ("_leave_out", "_left_out", "_limit", "_polls")

    def __init__(self, limit: float) -> None:
        # Windows has no poll. That of gevent and eventlet is not the system's, and while one of
        # their greenlets looks no other runs.
        known = getattr(getattr(select, "poll", None), "__module__", "") == "select"
        self._limit = limit if known else 0.0
        self._leave_out = self._left_out = 0
        self._polls = _Polls()

    def look(self, connection: Any) -> None:
        """Return once something can be read, or the moment is over."""
        if self._left_out < self._leave_out:
            self._left_out += 1
            return
        # Not a part of redis-py's public face, which cannot look without reading.
        sock = getattr(connection, "_sock", None)
        if sock is None or not self._limit:
            return
        try:
            poll = self._poll(sock)
        except (AttributeError, OSError, TypeError, ValueError):
            # Closed, or none of the system's; whoever reads will say so. Around the look itself,
            # this would swallow what a signal handler raises there.
            return
        self._look(poll)

    def _poll(self, sock: Any) -> Callable[[int], object]:
        polls, number = self._polls.by_number, sock.fileno()
        known = polls.get(number)
        if known is None:
            poll = select.poll()
            poll.register(number, select.POLLIN)
            known = polls[number] = poll.poll
        return known

    def _look(self, poll: Callable[[int], object]) -> None:
        # Perhaps the server itself wants this processor, or who was told before this one. Twice, as
        # there may be one of each.
        began = time.perf_counter()
        _let_others()
        _let_others()
        if not poll(0):
            give_up_at = time.perf_counter() + self._limit
            while not poll(0):
                # Once more: the last look may have let other threads of this process go before.
                if time.perf_counter() > give_up_at and not poll(0):
                    self._back_off()
                    return
                _let_others()
        if time.perf_counter() - began > max(LET_GO_FOR, self._limit):
            # The reply is there, but those who went before took long: where processors are that
            # busy, who sleeps is woken sooner than who has let others go before.
            self._back_off()
        else:
            self._leave_out = 0

    def _back_off(self) -> None:
        self._leave_out = min(2 * self._leave_out + 1, MOST_LEFT_OUT)
        self._left_out = 0
