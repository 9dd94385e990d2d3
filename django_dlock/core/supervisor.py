"""Looks after the queues of ``dispatch``: calls that take too long, forks, the end of the process.

From Python 3.12 on, no thread can start once the interpreter ends. Then a thread that is there
makes the calls of all queues, or the one that ends the process does, except those of users'
functions, which may hang.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from typing import Any

from .. import clock, process
from ..log import Line, logger
from .event_queue import MOST_NAMED, EventQueue

LOG_HANDLER = "A handler of the logger django_dlock"
"""What is named if a log line cannot be written."""
FORK_PATIENCE = 0.5
"""Seconds that a fork waits for calls that are under way."""
POLL_INTERVAL = 0.001
PATIENCE_AT_EXIT = 1.0
"""Seconds that the end of the process waits for events."""
IDLE = 60.0
"""Seconds with nothing to look at after which the thread ends."""


class Supervisor:
    """See the module.

    Attributes:
        lock: That of all queues, because a signal handler or a finalizer may post to any queue
            while its thread posts to another; with a lock for each, two threads could wait for
            each other. Reentrant for the same reason. Always entered directly, not through a
            condition, whose ``__exit__`` is Python code: a signal handler that raises at its start
            would leave it locked for ever.
        queues: In the order in which they post to each other.
        logs: That of log lines.
    """

    def __init__(self) -> None:
        self.queues: list[EventQueue] = []
        self._begin()
        self.logs = EventQueue(self, "dlock-log", is_log=True)

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self._forking: set[int] = set()
        self._woken = threading.Condition(self.lock)
        self._expected: set[EventQueue] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf

    # -- for the queues ----------------------------------------------------------------

    def adopt(self, queue: EventQueue) -> None:
        # Before ``logs``, to which it posts.
        self.queues.insert(max(0, len(self.queues) - 1), queue)

    def prepare(self) -> None:
        """Take part in forks and in the end of the process; before the first thread starts."""
        self.take_part_in_forks()
        process.at_exit(self.end)

    def tell(self, level: int, message: str, *args: Any, **facts: Any) -> None:
        """Log on the thread of ``logs``, because a handler may hang; as ``LockLogger`` does."""
        line = logger.line(level, message, *args, **facts)
        self.logs.post(lambda: logger.write(line), LOG_HANDLER)

    def expect(self, queue: EventQueue, at: float) -> None:
        """Look at this queue then; usually only compares two numbers."""
        self._expected.add(queue)
        if at >= self._wakes_at:
            return
        with self.lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="dlock-supervisor", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:
                    # The interpreter is ending, or the system has too many threads just now.
                    return
            # Only now, so that the next call tries again, also after an interrupt.
            self._wakes_at = min(self._wakes_at, at)
            self._woken.notify()

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self.lock:
                pause = min(self._wakes_at - clock.now(), IDLE)
                if pause > 0:
                    if not self._woken.wait(pause) and self._wakes_at == math.inf:
                        self._thread = None
                        return
                    continue
                self._wakes_at = math.inf
            wakes_at = self._look()
            with self.lock:
                self._wakes_at = min(self._wakes_at, wakes_at)

    def _look(self) -> float:
        wakes_at = math.inf
        for queue in list(self._expected):
            # Discard it first: a call that begins now adds it again.
            self._expected.discard(queue)
            try:
                due = queue.look(clock.now())
            except Exception as error:  # noqa: BLE001 - the thread must live
                self.tell(logging.ERROR, "Could not look at a queue of calls", exc_info=error)
                due = math.inf
            if due < math.inf:
                self._expected.add(queue)
                wakes_at = min(wakes_at, due)
        return wakes_at

    # -- forks -------------------------------------------------------------------------

    def take_part_in_forks(self) -> None:
        """Take part in forks from now on; the first event does so.

        Hooks before a fork run in reverse order. A hook that posts events must be registered
        after this call, so that it runs first.
        """
        process.at_fork(
            before=self.before_fork,
            after_in_parent=self.after_fork_in_parent,
            after_in_child=self.after_fork,
        )

    def before_fork(self) -> None:
        """Wait until no call is under way, except one that hangs, and let none begin.

        A lock that a call holds at the moment of the fork would stay locked in the child for
        ever. For example, SQLite keeps a record of its process's file locks; the child would
        inherit it, and wait for a lock that nobody releases.
        """
        give_up_at = clock.now() + FORK_PATIENCE
        while True:
            # Noted first, because an interrupt may come between any two lines.
            self._forking.add(threading.get_ident())
            self.lock.acquire()
            if clock.now() >= give_up_at or not any(queue.is_calling for queue in self.queues):
                return
            # The call may post, and needs the lock for that.
            self.after_fork_in_parent()
            time.sleep(POLL_INTERVAL)

    def after_fork_in_parent(self) -> None:
        """Let calls begin again."""
        if (me := threading.get_ident()) in self._forking:
            # Not if an interrupt came before it was acquired.
            with contextlib.suppress(RuntimeError):
                self.lock.release()
            self._forking.discard(me)

    def after_fork(self) -> None:
        """Forget the threads, locks and calls of the parent."""
        self._begin()
        for queue in self.queues:
            queue.after_fork()

    # -- the end of the process --------------------------------------------------------

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything posted before has been called; false after ``timeout``."""
        give_up_at, done = clock.now() + timeout, True
        # In this order: what was called may have posted to a later one.
        for queue in self.queues:
            if queue.is_busy:
                done = queue.flush(max(0.0, give_up_at - clock.now())) and done
        return done

    def settle(self, timeout: float) -> None:
        """Wait for the calls that are queued or under way, if any; at the end of the process."""
        give_up_at = clock.now() + timeout
        if self.is_stranded:
            for queue in self.queues:
                if queue.is_idle:
                    queue.post(self.drain, "")
                    queue.flush(timeout)
                    break
            else:
                for queue in self.queues:
                    if not queue.calls_users:
                        queue.drain()
        for queue in self.queues:
            queue.settle(max(0.0, give_up_at - clock.now()))

    @property
    def is_stranded(self) -> bool:
        """Whether calls wait and no thread could start, as at the end of the interpreter."""
        return any(queue.is_stranded for queue in self.queues)

    def drain(self) -> None:
        """Make all calls that no other thread makes on this one, which may hang in them."""
        # Log lines first, because they hang less often; and again, for those of the other calls.
        for queue in (self.logs, *self.queues):
            queue.drain()

    def end(self) -> None:
        """The process ends: wait for its events, and log what was not done."""
        self.settle(PATIENCE_AT_EXIT)
        lines: list[Line] = []
        more = 0
        for queue in self.queues:
            for name, count in queue.take_undone().items():
                if len(lines) < MOST_NAMED:
                    times = f"{name} ({count} times)" if count > 1 else name
                    lines.append(logger.line(logging.ERROR, queue.undone, times))
                else:
                    more += count
        if more:
            lines.append(logger.line(logging.ERROR, "%d more were not done", more))
        for line in lines:
            if self.logs.is_busy:
                # A handler hangs, and this thread would wait for its lock.
                sys.stderr.write(f"{line[1] % line[2]}\n")
            else:
                logger.write(line)
