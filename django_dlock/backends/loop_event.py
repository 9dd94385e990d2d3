"""Wakes a coroutine from any thread, and notices that its event loop was closed while it waited.

A loop that is closed never runs its coroutines again, and nothing tells them. Python ends them when
they are garbage, so what wakes a waiter must not keep it alive: the event is referred to weakly.
Until then, a lease that is handed over to such a coroutine would be used by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from functools import partial

from .. import clock

__all__ = ["LoopEvent"]


class LoopEvent:
    """An event for the coroutine that makes it.

    Args:
        abandoned: Called on the thread that wakes, if the loop is closed; never blocks.

    Attributes:
        wake: Sets the event; from any thread.
        is_set: Whether it was woken since the last ``clear``.
    """

    __slots__ = ("__weakref__", "_event", "_loop", "is_set", "wake")

    def __init__(self, abandoned: Callable[[], object]) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self.is_set = False
        self.wake: Callable[[], None] = partial(_wake, self._loop, weakref.ref(self), abandoned)

    def set(self) -> None:
        """Set it; on the thread of the loop only."""
        self.is_set = True
        self._event.set()

    def clear(self) -> None:
        """Forget earlier wake-ups."""
        self.is_set = False
        self._event.clear()

    async def sleep(self, until: float) -> bool:
        """Wait until it is set, or until that time on ``clock.now()``; was it the former?"""
        if not self.is_set:
            self._event.clear()
            # Not ``asyncio.wait_for``, which makes a task for each turn.
            timer = self._loop.call_later(max(0.0, until - clock.now()), self._event.set)
            try:
                await self._event.wait()
            finally:
                timer.cancel()
        return self.is_set


def _wake(
    loop: asyncio.AbstractEventLoop,
    reference: weakref.ref[LoopEvent],
    abandoned: Callable[[], object],
) -> None:
    event = reference()
    if event is None:
        return
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        # It is closed. At the end of the interpreter, no thread can start that would cancel.
        with contextlib.suppress(RuntimeError):
            abandoned()
