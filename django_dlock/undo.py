"""Takes back, in the background, attempts of which nobody waits for the answer any more.

An acquire that was interrupted or not answered may have been granted all the same. Nobody
renews such a lease, so it ends with its TTL at the latest; undone, it is free at once.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
from dataclasses import dataclass

from . import clock
from .backends.base import BaseLockBackend
from .exceptions import BackendUnavailable
from .lease import LeaseRequest

__all__ = ["schedule"]

logger = logging.getLogger("django_dlock")

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
# A request may wait in a paused server's socket for longer than its TTL.
PATIENCE = 60.0


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    due: float
    number: int
    backend: BaseLockBackend
    request: LeaseRequest
    min_hold: float
    give_up_at: float
    pause: float = FIRST_PAUSE

    def __lt__(self, other: _Job) -> bool:
        return (self.due, self.number) < (other.due, other.number)


class _Undoer:
    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._numbers = itertools.count()
        # Reentrant: a signal handler may interrupt this very thread while it schedules. Entered
        # as it is and not as the condition, see events.py.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._worker: threading.Thread | None = None
        self._hooked = False

    def schedule(
        self, backend: BaseLockBackend, request: LeaseRequest, *, min_hold: float = 0.0
    ) -> None:
        """Take an attempt back soon; never waits for the backend.

        Args:
            min_hold: Seconds since the grant during which the name stays taken all the same,
                for a lease whose release was not answered.
        """
        now = clock.now()
        give_up_at = now + request.ttl + PATIENCE
        job = _Job(now, next(self._numbers), backend, request, min_hold, give_up_at)
        with self._lock:
            heapq.heappush(self._jobs, job)
            self._ready.notify()
            if self._worker is not None and self._worker.is_alive():
                return
            if not self._hooked and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.after_fork)
            self._hooked = True
            self._worker = threading.Thread(target=self._run, name="dlock-undo", daemon=True)
            try:
                self._worker.start()
                return
            except RuntimeError:
                # The interpreter is going down: try once here.
                self._worker = None
                self._jobs.remove(job)
        self._try(job)

    def after_fork(self) -> None:
        # The parent takes its own attempts back.
        hooked = self._hooked
        self.__init__()  # type: ignore[misc]
        self._hooked = hooked

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._worker = None
                    return
                pause = self._jobs[0].due - clock.now()
                if pause > 0:
                    self._ready.wait(pause)
                    continue
                job = heapq.heappop(self._jobs)
            if not self._try(job):
                with self._lock:
                    heapq.heappush(self._jobs, job)

    def _try(self, job: _Job) -> bool:
        """Whether the job is over, done or given up; else it has a new ``due``."""
        backend, request = job.backend, job.request
        try:
            if job.min_hold:
                backend.release(
                    request.name,
                    request.owner,
                    min_hold=job.min_hold,
                    deadline=backend.call_deadline(),
                )
            else:
                backend.undo(request, deadline=backend.call_deadline())
        except BackendUnavailable as error:
            now = clock.now()
            if now >= job.give_up_at:
                logger.warning(
                    "Lock %r (alias %r): could not take back an unanswered attempt: %s",
                    request.name,
                    backend.alias,
                    error,
                )
                return True
            job.due = now + job.pause
            job.pause = min(job.pause * 2, LONGEST_PAUSE)
            return False
        except BaseException:
            logger.exception("Lock %r (alias %r): undo failed", request.name, backend.alias)
        return True


_undoer = _Undoer()
schedule = _undoer.schedule
