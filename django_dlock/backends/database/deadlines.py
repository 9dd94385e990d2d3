"""Cuts connections whose call is past its deadline.

No driver of a database takes a deadline for one statement. One thread of the process watches all
calls: it shuts the socket of a late one down, and the driver then raises in the caller's thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Protocol

from ... import clock

__all__ = ["Cuttable", "Deadlines", "deadlines"]

IDLE = 10.0
"""Seconds without a call after which the thread ends."""
LATE = 0.02
"""Seconds after its deadline at which a call is cut: an answer at the last moment still counts."""


class Cuttable(Protocol):
    def cut(self) -> None:
        """Make the call that is under way fail; runs on another thread."""


class Deadlines:
    """The calls that are under way, each with its deadline on ``clock.now()``."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, in a forked child, which has no thread."""
        self._pid = os.getpid()
        self._calls: dict[Cuttable, float] = {}
        self._changed = threading.Event()
        self._cutting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")

    def begin(self, connection: Cuttable, deadline: float) -> None:
        if self._pid != os.getpid():
            self.forget()
        # Before the thread is looked at, which looks at the calls before it ends.
        self._calls[connection] = deadline
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dlock-deadlines", daemon=True)
            # No new threads while the interpreter ends: the call has no deadline then.
            with contextlib.suppress(RuntimeError):
                self._thread.start()
        elif deadline < self._wakes_at:
            self._changed.set()

    def end(self, connection: Cuttable) -> bool:
        """The call is over; false where it was cut, so that the connection is of no use."""
        if self._calls.pop(connection, None) is not None:
            return True
        # Not closed while it is being cut: its number may be another file's at once.
        with self._cutting:
            return False

    def _run(self) -> None:
        busy_at = clock.now()
        while True:
            self._changed.clear()
            # Whoever begins a call from here on sets the event.
            self._wakes_at = float("inf")
            now = clock.now()
            soonest = min(self._cut_late(now), default=now + IDLE)
            if self._calls:
                busy_at = now
            elif now - busy_at >= IDLE:
                self._thread = None
                if not self._calls:
                    return
                self._thread = threading.current_thread()
                continue
            self._wakes_at = soonest
            self._changed.wait(max(0.0, soonest - now) + LATE)

    def _cut_late(self, now: float) -> list[float]:
        """Cut those that are late; the deadlines of the others."""
        later = []
        for connection, deadline in self._calls.copy().items():
            if deadline + LATE / 2 > now:
                later.append(deadline)
                continue
            with self._cutting:
                if self._calls.pop(connection, None) is not None:
                    connection.cut()
        return later


deadlines = Deadlines()
"""Of this process."""
