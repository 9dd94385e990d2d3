"""Delivers signals, ``on_lost``, log lines and the like on a thread of its own.

User code must not run on the renewal thread, and a receiver that hangs must not keep anybody
from renewing or releasing. The thread starts with the first event and goes after a minute
without one. When one delivery hangs, another thread takes over the rest of the queue.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

from . import clock

__all__ = [
    "Deliverer",
    "call",
    "complain",
    "flush",
    "heard",
    "hook",
    "nudge",
    "send",
    "settle",
    "warn",
]

logger = logging.getLogger("django_dlock")

HANGING_AFTER = 5.0
"""Seconds after which a delivery counts as hanging."""
MAX_HANGING = 8
"""Threads that may hang in user code before events wait for them."""
FORK_PATIENCE = 0.5
"""Seconds that a fork waits for the delivery that is under way."""
MAX_QUEUED = 100_000
IDLE = 60.0

Delivery = Callable[[], object]


class Deliverer:
    """A queue of calls and the thread that works it off, in order."""

    def __init__(self) -> None:
        self._queue: collections.deque[Delivery] = collections.deque()
        # Reentrant: a signal handler or a finalizer may post while its own thread posts. Always
        # entered as it is and not as the condition, which a signal handler that raises can
        # leave locked for ever: its ``__exit__`` is Python, and may be interrupted at its start.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._worker: threading.Thread | None = None
        self._busy_since: float | None = None
        self._hanging = 0
        self._hooked = False
        self._kept_by: int | None = None

    def post(self, delivery: Delivery) -> None:
        """Queue a call; never blocks and never raises what the call raises."""
        with self._lock:
            if len(self._queue) >= MAX_QUEUED:
                logger.error("Events are not delivered: %d wait behind a receiver", MAX_QUEUED)
                return
            self._queue.append(delivery)
            self._ready.notify()
            self._ensure_worker()

    def nudge(self) -> None:
        """Let another thread take over if a delivery hangs and others wait behind it."""
        if self._queue:
            with self._lock:
                self._ensure_worker()

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything posted before has been delivered; false after ``timeout``."""
        done = threading.Event()
        self.post(done.set)
        return done.wait(timeout)

    def settle(self, timeout: float) -> None:
        """Wait for what is under way, at once where nothing is; for the end of the process."""
        worker = self._worker
        # A thread that has gone cannot be followed by another while the interpreter ends.
        if worker is not None and worker.is_alive() and (self._queue or self._busy_since):
            self.flush(timeout)

    def before_fork(self) -> None:
        """Let no delivery be in the middle of its work, but for one that hangs.

        What it holds at that moment would be held in the child for ever: SQLite, for one, keeps
        its locks per process, and the child would wait for its own copy of them.
        """
        give_up_at = clock.now() + FORK_PATIENCE
        while self._worker is not threading.current_thread():
            self._lock.acquire()
            if self._busy_since is None:
                # Kept, so that none begins.
                self._kept_by = threading.get_ident()
                return
            self._lock.release()
            if clock.now() >= give_up_at:
                return
            time.sleep(0.001)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._kept_by == threading.get_ident():
            self._kept_by = None
            self._lock.release()

    def after_fork(self) -> None:
        """Forget thread, lock and queue of the parent."""
        hooked = self._hooked
        self.__init__()  # type: ignore[misc]
        self._hooked = hooked

    def hook(self) -> None:
        """Take part in forks from now on; the first event does so.

        Of what runs before a fork, what was registered first comes last: who still has something
        to tell then has to call this before it registers its own.
        """
        with self._lock:
            if not self._hooked and hasattr(os, "register_at_fork"):
                os.register_at_fork(
                    before=self.before_fork,
                    after_in_parent=self.after_fork_in_parent,
                    after_in_child=self.after_fork,
                )
            self._hooked = True

    def _ensure_worker(self) -> None:
        worker = self._worker
        if worker is not None and worker.is_alive():
            since = self._busy_since
            hangs = since is not None and clock.now() - since > HANGING_AFTER
            if not hangs or self._hanging >= MAX_HANGING:
                return
            self._hanging += 1
            self._queue.appendleft(_tell_hanging)
        self.hook()
        self._busy_since = None
        self._worker = threading.Thread(target=self._run, name="dlock-events", daemon=True)
        try:
            self._worker.start()
        except RuntimeError:
            # The interpreter is going down; there is nobody left to be told.
            self._worker = None

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                if self._worker is not me:
                    # Replaced while a delivery hung here; it has come back after all.
                    self._hanging -= 1
                    return
                self._busy_since = None
                if not self._queue and not self._ready.wait_for(lambda: self._queue, IDLE):
                    self._worker = None
                    return
                delivery = self._queue.popleft()
                self._busy_since = clock.now()
            try:
                delivery()
            except BaseException:
                logger.exception("A callback for a lock event raised")


def _tell_hanging() -> None:
    logger.error("A receiver of a lock event hangs for %g s", HANGING_AFTER)


_deliverer = Deliverer()
nudge = _deliverer.nudge
flush = _deliverer.flush
settle = _deliverer.settle
hook = _deliverer.hook


def call(function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` on the events thread."""
    _deliverer.post(lambda: function(*args))


def warn(message: str, *args: Any) -> None:
    """Log on the events thread: a project's handlers may hang as its receivers may."""
    _deliverer.post(lambda: logger.warning(message, *args))


def complain(error: BaseException, message: str, *args: Any) -> None:
    """As ``warn``, about what ought not to happen."""
    _deliverer.post(lambda: logger.error(message, *args, exc_info=error))


def heard(signal: Signal, sender: type) -> bool:
    """Whether anybody listens; costs next to nothing where nobody does."""
    return bool(signal.receivers) and signal.has_listeners(sender)


def send(signal: Signal, sender: type, **facts: Any) -> None:
    """Send a signal from the events thread, if anybody listens."""
    if heard(signal, sender):
        _deliverer.post(lambda: _send(signal, sender, facts))


def _send(signal: Signal, sender: type, facts: dict[str, Any]) -> None:
    for receiver, outcome in signal.send_robust(sender, **facts):
        if isinstance(outcome, Exception):
            logger.error("Receiver %r of a lock signal raised", receiver, exc_info=outcome)
