"""How a thread or a coroutine waits until the store tells its process something; the same rules
everywhere.

* **Each waiter has a place**, under its owner. A wake-up that comes between taking the place and
  the first sleep is not lost. A store that cannot tell later what it has sent takes the place
  before it asks; the others look, before each sleep, for what came earlier.
* **Nobody who is gone keeps a place.** It is left however the wait ends: an interrupt may come
  between any two lines.
* **A loop that is closed never runs its coroutines again**, and nothing tells them. Who wakes one
  of them notices: the place is left, and the acquire is cancelled, so that no lease goes to a
  coroutine that would not use it. Python ends such coroutines when they are garbage, so what wakes
  one must not keep it alive: its event is referred to weakly.
* **A wait that goes on in a forked child** ends: what it waits for is told to the parent.

Nothing here takes a thread lock, which a fork, a signal handler or a finalizer could find locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from ... import clock
from ...process.points import reached

POLL_INTERVAL = 0.1, 0.5
"""Shortest and longest time, in seconds, before a waiter that nothing would wake asks again."""
FIRST_CHECK, CHECK_EVERY = 0.05, 0.5
"""Seconds after which a waiter first checks whether to stop, and between further checks."""


def poll_at(until: float) -> float:
    """When a waiter that nothing would wake asks again, on ``clock.now()``."""
    return min(until, clock.now() + random.uniform(*POLL_INTERVAL))


class Waiter:
    """One thread or coroutine.

    Attributes:
        wake: Makes it look whether its wait is over; from any thread, and never blocks.
        asks_again: Its wait is over, even if it has not begun.
        waits: It waits, or is about to.
    """

    __slots__ = ("asks_again", "owner", "waits", "wake")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.wake: Callable[[], object] = _wake_nobody
        self.asks_again = self.waits = False

    def end_wait(self) -> None:
        """Let it ask the store again."""
        self.asks_again = True
        self.wake()


W = TypeVar("W", bound=Waiter)


class Waiters(Generic[W]):
    """The waiters of this process at one store. Iterates over those that are there now.

    Args:
        left: Called when somebody leaves; after an interrupt, perhaps twice.

    Attributes:
        by_owner: In the order in which they came. Every operation on it is atomic by itself.
        needed_at: When somebody last stopped waiting.
    """

    def __init__(self, left: Callable[[W], object] | None = None) -> None:
        self._left = left
        self.by_owner: dict[str, W] = {}
        self.needed_at = float("-inf")

    def __iter__(self) -> Iterator[W]:
        return iter(list(self.by_owner.values()))

    def forget(self) -> None:
        """Start again in a forked child."""
        for waiter in self:
            # Not woken: the child shares the means with its parent. It looks before long.
            waiter.asks_again = True
        self.by_owner, self.needed_at = {}, float("-inf")

    def are_needed(self, linger: float) -> bool:
        """Whether anybody is there, or has waited in the last ``linger`` seconds."""
        return bool(self.by_owner) or clock.now() < self.needed_at + linger

    def end_waits(self) -> None:
        """Let all of them ask the store again."""
        for waiter in self:
            waiter.end_wait()

    def enter(self, waiter: W) -> None:
        """Take its place before it waits; the caller sees to it that it leaves."""
        self.by_owner[waiter.owner] = waiter

    def leave(self, waiter: W) -> None:
        """Give its place up; a second call does no harm."""
        if self.by_owner.get(waiter.owner) is waiter:
            if waiter.waits:
                self.needed_at = clock.now()
            self.by_owner.pop(waiter.owner, None)
        if self._left is not None:
            self._left(waiter)

    def wait(
        self,
        waiter: W,
        until: float,
        interrupted: Callable[[], bool],
        is_over: Callable[[], bool] = lambda: False,
        sleep: Callable[[ThreadEvent, float], object] | None = None,
    ) -> None:
        """Block until the wait is over, then leave.

        Args:
            until: When it ends at the latest, on ``clock.now()``.
            interrupted: Called about twice a second; ends the wait if it returns true.
            is_over: Called before each sleep.
            sleep: What a thread does until it is woken, in place of ``ThreadEvent.sleep``.
        """
        try:
            try:
                event = ThreadEvent()
                waiter.wake = event.set
                for turn in self._turns(waiter, until, interrupted, is_over):
                    if sleep is None:
                        reached("wait.asleep", waiter=waiter.owner)
                        event.sleep(turn)
                    else:
                        sleep(event, turn)
            finally:
                self.leave(waiter)
        except BaseException:
            # Repeated because an interrupt may land inside the first attempt.
            self.leave(waiter)
            raise

    async def async_wait(
        self,
        waiter: W,
        until: float,
        interrupted: Callable[[], bool],
        abandoned: Callable[[], object],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """As ``wait``, for coroutines; takes no thread.

        Args:
            abandoned: Called if the loop was closed, on the thread that wakes; never blocks.
        """
        try:
            try:
                event = LoopEvent(partial(self._abandoned, waiter, abandoned))
                waiter.wake = event.wake
                for turn in self._turns(waiter, until, interrupted, is_over):
                    reached("wait.asleep", waiter=waiter.owner)
                    await event.sleep(turn)
            finally:
                self.leave(waiter)
                # It refers to the waiter: a cycle.
                waiter.wake = _wake_nobody
        except BaseException:
            # See ``wait``.
            self.leave(waiter)
            waiter.wake = _wake_nobody
            raise

    def _turns(
        self,
        waiter: W,
        until: float,
        interrupted: Callable[[], bool],
        is_over: Callable[[], bool],
    ) -> Iterator[float]:
        """Yield until when to sleep next, as long as the wait is not over."""
        waiter.waits = True
        self.enter(waiter)
        check_at = clock.now() + FIRST_CHECK
        while not (waiter.asks_again or is_over() or (now := clock.now()) >= until):
            if now >= check_at:
                if interrupted():
                    return
                check_at = now + CHECK_EVERY
            yield min(until, check_at)

    def _abandoned(self, waiter: W, abandoned: Callable[[], object]) -> None:
        """Its coroutine never runs again."""
        self.leave(waiter)
        abandoned()


class ThreadEvent:
    """Wakes a thread; what wakes it before it sleeps counts.

    A bare lock that is held until it is set. An interrupt can leave the lock inside a
    ``threading.Event`` held forever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._lock.release()  # Unless it is set already.

    def sleep(self, until: float) -> None:
        """Wait until it is set, or until that time on ``clock.now()``."""
        self._lock.acquire(timeout=max(0.0, until - clock.now()))


class LoopEvent:
    """Wakes the coroutine that makes it; what wakes it before it sleeps counts.

    Args:
        abandoned: Called on the thread that wakes, if the loop is closed; never blocks.

    Attributes:
        loop: Of the coroutine.
        wake: Sets the event; from any thread.
    """

    __slots__ = ("__weakref__", "_event", "loop", "wake")

    def __init__(self, abandoned: Callable[[], object]) -> None:
        self.loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        # Not by the loop: a place would keep one alive that was dropped without being closed.
        self.wake: Callable[[], None] = partial(_wake, weakref.ref(self), abandoned)

    def set(self) -> None:
        """Set it; on the thread of the loop only."""
        self._event.set()

    async def sleep(self, until: float) -> None:
        """Wait until it is set, or until that time on ``clock.now()``."""
        # Not ``asyncio.wait_for``, which makes a task for each turn.
        timer = self.loop.call_later(max(0.0, until - clock.now()), self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()
        self._event.clear()


def _wake_nobody() -> None:
    """For a waiter that does not wait."""


def _wake(reference: weakref.ref[LoopEvent], abandoned: Callable[[], object]) -> None:
    event = reference()
    if event is None:
        return
    try:
        event.loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        # It is closed. At the end of the interpreter, no thread can start that would cancel.
        with contextlib.suppress(RuntimeError):
            abandoned()
