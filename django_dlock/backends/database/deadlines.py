"""Cuts connections whose call is past its deadline.

No database driver takes a deadline for one statement. So one thread of the process watches all
calls. It shuts down the socket of a late call; the driver then raises in the caller's thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Protocol

from ... import clock
from ...log import logger
from ...process.points import reached

IDLE = 10.0
"""Seconds without a call after which the watching thread ends."""
LATE = 0.02
"""Seconds after its deadline at which a call is cut, so that a reply just in time still counts."""


class Cuttable(Protocol):
    def cut(self) -> None:
        """Make the running call fail; called from another thread."""


class Deadlines:
    """The running calls, each with its deadline on ``clock.now()``."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, which does not have the thread."""
        self._pid = os.getpid()
        self._calls: dict[Cuttable, float] = {}
        # Not an Event: an interrupt can leave the lock inside it held forever.
        self._changed = queue.SimpleQueue[None]()
        self._cutting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")

    def begin(self, connection: Cuttable, deadline: float) -> None:
        if self._pid != os.getpid():
            self.forget()
        # Before the check for the thread: the thread checks for calls before it ends.
        self._calls[connection] = deadline
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dlock-deadlines", daemon=True)
            # No thread can start while the interpreter shuts down; the call has no deadline then.
            with contextlib.suppress(RuntimeError):
                self._thread.start()
        elif deadline < self._wakes_at:
            self._changed.put(None)

    def end(self, connection: Cuttable) -> bool:
        """Note that the call has ended; false if it was cut: then the connection is useless."""
        if self._calls.pop(connection, None) is not None:
            return True
        # Do not close it while it is being cut: another file may get its number at once.
        with self._cutting:
            return False

    def _run(self) -> None:
        busy_at = clock.now()
        while True:
            # A call that begins after this line wakes this thread.
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
            reached("worker.asleep", name="dlock-deadlines", until=soonest)
            with contextlib.suppress(queue.Empty):
                self._changed.get(timeout=max(0.0, soonest - now) + LATE)

    def _cut_late(self, now: float) -> list[float]:
        """Cut the late calls; return the deadlines of the others."""
        later = []
        for connection, deadline in self._calls.copy().items():
            if deadline + LATE / 2 > now:
                later.append(deadline)
                continue
            with self._cutting:
                if self._calls.pop(connection, None) is not None:
                    _cut(connection)
        return later


def _cut(connection: Cuttable) -> None:
    try:
        connection.cut()
    except Exception:
        # This thread goes on, for the other calls.
        logger.warning("A call to the database outlives its deadline", exc_info=True)


deadlines = Deadlines()
"""The only instance in this process."""
