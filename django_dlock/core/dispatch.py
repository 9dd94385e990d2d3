"""Calls signal receivers and ``on_lost``, and writes log lines, on a thread of its own.

User code must not run on the renewal thread, and a receiver that hangs must not stop renewals or
releases. The thread starts with the first event and ends after a minute without one. If a delivery
hangs, another thread takes over the rest of the queue.

What may wait for a server has a queue, and so a thread, of its own: see ``audit``.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

from .. import clock, process
from ..log import logger

__all__ = [
    "EventQueue",
    "call",
    "flush",
    "has_receivers",
    "log_error",
    "log_warning",
    "log_warning_later",
    "nudge",
    "send",
    "settle",
    "slow",
    "take_part_in_forks",
]

HANGING_AFTER = 5.0
"""Seconds after which a delivery counts as hanging."""
MAX_HANGING = 8
"""Threads that may hang in user code before events wait for them."""
FORK_PATIENCE = 0.5
"""Seconds that a fork waits for the delivery that is under way."""
MAX_QUEUED = 100_000
IDLE = 60.0

EventCall = Callable[[], object]


class EventQueue:
    """A queue of calls, and the thread that makes them in order.

    Args:
        name: Of the thread.
        most_hanging: Threads that may hang before events wait for them.
    """

    def __init__(self, name: str = "dlock-dispatch", most_hanging: int | None = None) -> None:
        self._name, self._most_hanging = name, most_hanging
        self._queue: collections.deque[EventCall] = collections.deque()
        # Reentrant: a signal handler or a finalizer may post while its own thread posts. Always
        # entered directly, not through the condition, whose ``__exit__`` is Python code: a signal
        # handler that raises at its start would leave the lock locked for ever.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._worker: threading.Thread | None = None
        self._busy_since: float | None = None
        self._hanging = 0
        self._kept_by: int | None = None

    def post(self, delivery: EventCall) -> None:
        """Queue a call; never blocks and never raises what the call raises."""
        with self._lock:
            if len(self._queue) >= MAX_QUEUED:
                logger.error("Events are not delivered: %d wait behind a receiver", MAX_QUEUED)
                return
            self._queue.append(delivery)
            self._ready.notify()
            self._ensure_worker()

    def post_or_call(self, delivery: EventCall) -> None:
        """Queue a call; make it here if no thread can start, as at the end of the interpreter."""
        with self._lock:
            self.post(delivery)
            if self._worker is not None or not self._queue or self._queue[-1] is not delivery:
                return
            self._queue.pop()
        delivery()

    def put(self, delivery: EventCall) -> None:
        """Queue a call for the thread that is there, or for the next one."""
        self._queue.append(delivery)

    def nudge(self) -> None:
        """Wake the thread for what was ``put``; let another one take over if a delivery hangs."""
        if self._queue:
            with self._lock:
                self._ready.notify()
                self._ensure_worker()

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued or under way."""
        with self._lock:
            return bool(self._queue) or self._busy_since is not None

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything posted before has been delivered; false after ``timeout``."""
        done = threading.Event()
        self.post(done.set)
        return done.wait(timeout)

    def settle(self, timeout: float) -> None:
        """Wait for the calls that are queued or under way, if any; at the end of the process."""
        worker = self._worker
        # While the interpreter ends, no new thread can replace one that is gone.
        if worker is not None and worker.is_alive() and (self._queue or self._busy_since):
            self.flush(timeout)

    def before_fork(self) -> None:
        """Wait until no delivery is under way, except one that hangs, and let none begin.

        A lock that a delivery holds at the moment of the fork would stay locked in the child for
        ever. For example, SQLite keeps a record of its process's file locks; the child would
        inherit it, and wait for a lock that nobody releases.
        """
        give_up_at = clock.now() + FORK_PATIENCE
        while self._worker is not threading.current_thread():
            self._lock.acquire()
            if self._busy_since is None:
                # Keep the lock, so that none begins.
                self._kept_by = threading.get_ident()
                return
            self._lock.release()
            if clock.now() >= give_up_at:
                return
            time.sleep(0.001)

    def after_fork_in_parent(self) -> None:
        """Let deliveries begin again."""
        if self._kept_by == threading.get_ident():
            self._kept_by = None
            self._lock.release()

    def after_fork(self) -> None:
        """Discard thread, lock and queue of the parent."""
        self.__init__(self._name, self._most_hanging)  # type: ignore[misc]

    def take_part_in_forks(self) -> None:
        """Take part in forks from now on; the first event does so.

        Hooks before a fork run in reverse order. A hook that posts events must be registered
        after this call, so that it runs first.
        """
        with self._lock:
            process.at_fork(
                before=self.before_fork,
                after_in_parent=self.after_fork_in_parent,
                after_in_child=self.after_fork,
            )

    def _ensure_worker(self) -> None:
        worker = self._worker
        if worker is not None and worker.is_alive():
            since = self._busy_since
            hangs = since is not None and clock.now() - since > HANGING_AFTER
            most = MAX_HANGING if self._most_hanging is None else self._most_hanging
            if not hangs or self._hanging >= most:
                return
            self._hanging += 1
            self._queue.appendleft(_tell_hanging)
        self.take_part_in_forks()
        self._busy_since = None
        self._worker = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._worker.start()
        except RuntimeError:
            # The interpreter is ending, so no receiver can run any more.
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


_event_queue = EventQueue()
nudge = _event_queue.nudge
take_part_in_forks = _event_queue.take_part_in_forks

slow = EventQueue("dlock-slow-events", most_hanging=0)
"""For calls of receivers to a server, such as writing a row, so that other events never wait for a
server. While one call hangs, the next ones wait, so that no further connection hangs."""


def flush(timeout: float = 5.0) -> bool:
    """Wait until everything posted before has been delivered; false after ``timeout``."""
    give_up_at = clock.now() + timeout
    # What was delivered may have posted slow events.
    done = _event_queue.flush(timeout)
    return done and (not slow.is_busy or slow.flush(max(0.0, give_up_at - clock.now())))


def settle(timeout: float) -> None:
    """Wait for the calls that are queued or under way, if any; at the end of the process."""
    give_up_at = clock.now() + timeout
    _event_queue.settle(timeout)
    slow.settle(max(0.0, give_up_at - clock.now()))


def call(function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` on the dispatch thread."""
    _event_queue.post(lambda: function(*args))


def log_warning(message: str, *args: Any, **facts: Any) -> None:
    """Log on the dispatch thread, because a project's log handlers may hang, too."""
    line = logger.line(logging.WARNING, message, *args, **facts)
    _event_queue.post(lambda: logger.write(line))


def log_warning_later(message: str, *args: Any, **facts: Any) -> None:
    """As ``log_warning``, with the next event or the watchdog's next turn; starts no thread.

    For code that runs during garbage collection, where starting a thread would let others run.
    """
    line = logger.line(logging.WARNING, message, *args, **facts)
    _event_queue.put(lambda: logger.write(line))


def log_error(error: BaseException, message: str, *args: Any, **facts: Any) -> None:
    """Log an error that should not happen, with its traceback."""
    line = logger.line(logging.ERROR, message, *args, exc_info=error, **facts)
    _event_queue.post(lambda: logger.write(line))


def has_receivers(signal: Signal, sender: type) -> bool:
    """Whether the signal has receivers; very cheap if it has none."""
    return bool(signal.receivers) and signal.has_listeners(sender)


def send(signal: Signal, sender: type, **facts: Any) -> None:
    """Send a signal from the dispatch thread, if it has receivers."""
    if has_receivers(signal, sender):
        _event_queue.post(lambda: _send(signal, sender, facts))


def _send(signal: Signal, sender: type, facts: dict[str, Any]) -> None:
    for receiver, outcome in signal.send_robust(sender, **facts):
        if isinstance(outcome, Exception):
            logger.error("Receiver %r of a lock signal raised", receiver, exc_info=outcome)
