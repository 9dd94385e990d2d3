"""The line in front of the backend: callers of this process that want the same name.

Only the first of a line asks and waits at the backend; the others sleep here until it has its
grant or has given up. So a process has one place in the backend's queue, however many of its
threads and coroutines wait, and every grant is the backend's all the same.

There is no thread lock, which a signal handler or a finalizer could meet locked by the very
thread that it interrupts. Each step is one operation of a list or a dictionary, so it is atomic;
each method may be cut short between any two steps and called again. Nobody is handed the turn:
whoever stands first has it, so it cannot be lost on its way. A wake-up can; it costs one LOOK.

All stand under the eyes of those behind: ``seen`` is when a place's thread, or its loop, was last
known to run. One that has stalled (a loop that is blocked or ended, a signal handler that does
not return) is taken out of the line by the first who notices.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from . import clock
from .backends.base import BaseLockBackend
from .lease import Contention

__all__ = ["LOOK", "Place", "forget"]

LOOK = 1.0
"""Seconds after which a sleeper looks at the line although nothing woke it."""
STALLED_AFTER = 2.0
"""Seconds without a sign of life, or a second more than a command may take."""

_lines: dict[tuple[BaseLockBackend, str], list[Place]] = {}


def forget() -> None:
    """Runs in a forked child, to which none of those who stand in line belong."""
    for line in _lines.values():
        # One whose thread forked would bring its line back when it leaves.
        line.clear()
    _lines.clear()


class Place:
    """One caller's place in the line for a name; in none until ``line_up``.

    Args:
        loop: That of a coroutine; ``None`` for one whose thread does nothing else while it waits.

    Attributes:
        seen: See the module.
        asks: It asks at the backend, as the first of a line did, and is known there as a waiter.
        told: It may ask once although it is not the first.
        contention: What it met at the backend last.
    """

    # On the class, so that the many who are alone need not set them.
    asks = told = False
    contention: Contention | None = None
    _wake: Callable[[], bool] | None = None

    def __init__(
        self,
        backend: BaseLockBackend,
        name: str,
        now: float,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._key = (backend, name)
        self._loop = loop
        self._thread = threading.get_ident()
        self._line: list[Place] | None = None
        self.seen = now

    # -- in the line -------------------------------------------------------------------

    def line_up(self) -> bool:
        """Go to the end of the line; whether it is this one's turn already."""
        # Noted before it is tried, so that whatever interrupts, ``leave`` knows where to look.
        fresh = self._line = [self]
        line = _lines.setdefault(self._key, fresh)
        return line is fresh or self._line_up_behind(line)

    def _line_up_behind(self, line: list[Place]) -> bool:
        if self._loop is None and any(other._thread == self._thread for other in line.copy()):
            # A signal handler or a finalizer came between, or this call blocks the loop of a
            # coroutine: it would wait for itself. It goes beside the line.
            self._line = None
            return True
        self._line = line
        line.append(self)
        if _lines.get(self._key) is line:
            return _first(line) is self
        # Its last one left and closed it meanwhile.
        _take_out(line, self)
        return self.line_up()

    def is_first(self) -> bool:
        """Whether nobody stands before; so it is beside a line, too."""
        line = self._line
        return line is None or (_first(line) is self and _lines.get(self._key) is line)

    def may_ask(self) -> bool:
        """Whether it is the first or was told; puts the line right where it is not."""
        if self.told or self.is_first():
            return True
        line = self._line or []
        if self in line and _lines.get(self._key) is line:
            first = _first(line)
            if first is not None and first.has_stalled(clock.now()):
                _wake_first(line)
            return self.is_first()
        # Taken out, because it seemed to have stalled, or its line was closed.
        self.leave()
        if self.asks:
            # The backend may grant to it at any moment; it must go on there.
            self._line = None
            return True
        return self.line_up()

    def leave(self) -> None:
        """Let the next one have its turn; does no harm when it is repeated."""
        line = self._line
        if line is None:
            return
        while True:
            if len(line) == 1 and self in line and _lines.get(self._key) is line:
                # Only the first of a line closes it, so that nobody closes a stranger's.
                _lines.pop(self._key, None)
            _take_out(line, self)
            if line:
                self._let_go_on(line)
            if line or _lines.get(self._key) is not line:
                return
            # The last two left at once, and neither was alone: once more, as its only one.
            line.append(self)

    def _let_go_on(self, line: list[Place]) -> None:
        """Wake whoever has the turn in a line that this place has left."""
        if _lines.setdefault(self._key, line) is line:
            _wake_first(line)
            return
        # Somebody lined up while it was being closed, and others in a new one since.
        for other in line.copy():
            other.wake()

    def warn(self) -> None:
        """The backend gave this one no answer: let each of the others ask it once for itself."""
        line = self._line
        if line is not None and self.is_first():
            for other in line[1:]:
                other.told = True
                other.wake()

    def met_before(self) -> Contention | None:
        """What the first of the line met at the backend."""
        first = _first(self._line or [])
        return None if first is None else first.contention

    # -- signs of life -----------------------------------------------------------------

    def beat(self) -> float:
        """Note that its thread or loop runs; gives the time."""
        self.seen = now = clock.now()
        return now

    def prove_life(self) -> None:
        """Have its own thread or loop beat, for one who works for it on another thread."""
        if self._loop is None or self._thread == threading.get_ident():
            self.beat()
            return
        try:
            self._loop.call_soon_threadsafe(self.beat)
        except RuntimeError:
            # Closed.
            pass

    def has_stalled(self, now: float) -> bool:
        """Whether there was no sign of life for too long."""
        return now - self.seen > max(STALLED_AFTER, self._key[0].command_timeout + LOOK)

    # -- sleep -------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Block until woken, or for so long."""
        # A bare lock, which no interrupt can leave in disorder, see events.py.
        alarm = threading.Lock()
        alarm.acquire()
        self._wake = partial(_ring, alarm)
        # After it can be woken, or the wake-up that comes just now would be missed.
        if not (self.told or self.is_first()):
            alarm.acquire(timeout=seconds)
        self._wake = None

    async def asleep(self, seconds: float) -> None:
        """As ``sleep``, for coroutines."""
        loop = asyncio.get_running_loop()
        alarm: asyncio.Future[None] = loop.create_future()
        self._wake = partial(_ring_in, loop, alarm)
        if not (self.told or self.is_first()):
            timer = loop.call_later(seconds, _settle, alarm)
            try:
                await alarm
            finally:
                timer.cancel()
        self._wake = None

    def wake(self) -> bool:
        """End its sleep; false where nobody is there to be woken now."""
        wake = self._wake
        return wake is None or wake()


def _first(line: list[Place]) -> Place | None:
    return next(iter(line), None)


def _take_out(line: list[Place], place: Place) -> None:
    try:
        line.remove(place)
    except ValueError:
        pass


def _wake_first(line: list[Place]) -> None:
    """Wake whoever has the turn, past those who could not take it."""
    now = clock.now()
    while (first := _first(line)) is not None:
        if first.wake() and not first.has_stalled(now):
            return
        # Should it come to itself after all, it finds itself outside and lines up again.
        _take_out(line, first)


def _ring(alarm: Any) -> bool:
    try:
        alarm.release()
    except RuntimeError:
        # It rings already.
        pass
    return True


def _ring_in(loop: asyncio.AbstractEventLoop, alarm: asyncio.Future[None]) -> bool:
    try:
        loop.call_soon_threadsafe(_settle, alarm)
    except RuntimeError:
        # Closed.
        return False
    return loop.is_running()


def _settle(alarm: asyncio.Future[None]) -> None:
    if not alarm.done():
        alarm.set_result(None)
