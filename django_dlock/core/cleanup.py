"""Cancels, in the background, acquires that were not answered, and repeats such releases.

An acquire that was interrupted or not answered may have been granted. Nobody renews such a lease,
so it ends with its TTL at the latest; if it is cancelled, the name is free at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .. import clock, process
from ..backends.base import BaseLockBackend
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..lease import LeaseRequest
from ..log import logger

__all__ = ["cancel_later"]

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
# A request may wait in a paused server's socket for longer than its TTL.
PATIENCE = 60.0


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    backend: BaseLockBackend
    request: LeaseRequest
    min_hold: float
    due: float
    give_up_at: float
    pause: float = FIRST_PAUSE

    def carry_out(self) -> bool:
        """Returns ``True`` if the job is done or given up; else sets a new ``due``."""
        backend, (name, owner, *_) = self.backend, self.request
        deadline = backend.call_deadline()
        try:
            if self.min_hold:
                backend.release(name, owner, min_hold=self.min_hold, deadline=deadline)
            else:
                backend.cancel_acquire(self.request, deadline=deadline)
        except BackendUnavailable as error:
            now = clock.now()
            if now < self.give_up_at:
                self.due, self.pause = now + self.pause, min(self.pause * 2, LONGEST_PAUSE)
                return False
            logger.warning(
                "Lock %r (alias %r): could not cancel an unanswered acquire or release: %s",
                name,
                backend.alias,
                error,
                about=self.request,
                alias=backend.alias,
            )
        except InvalidLockBackend:
            # It has granted nothing, and the acquire has raised the same error.
            return True
        except BaseException:
            logger.exception(
                "Lock %r (alias %r): cleanup failed",
                name,
                backend.alias,
                about=self.request,
                alias=backend.alias,
            )
        return True


class _Canceller:
    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        # Reentrant: a signal handler may interrupt this very thread while it schedules. Entered
        # directly, not through the condition; see core/dispatch.py.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._worker: threading.Thread | None = None

    def cancel_later(
        self, backend: BaseLockBackend, request: LeaseRequest, *, min_hold: float = 0.0
    ) -> None:
        """Cancel an acquire soon; never waits for the backend.

        Args:
            min_hold: Seconds since the grant during which the name stays taken all the same,
                for a lease whose release was not answered.
        """
        now = clock.now()
        job = _Job(backend, request, min_hold, now, now + request.ttl + PATIENCE)
        with self._lock:
            self._jobs.append(job)
            self._ready.notify()
            if self._worker is not None and self._worker.is_alive():
                return
            process.at_fork(after_in_child=self.after_fork)
            self._worker = threading.Thread(target=self._run, name="dlock-cleanup", daemon=True)
            try:
                self._worker.start()
                return
            except RuntimeError:
                # The interpreter is going down: try once here.
                self._worker = None
                self._jobs.remove(job)
        job.carry_out()

    def after_fork(self) -> None:
        # The parent cancels its own acquires.
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._worker = None
                    return
                job = min(self._jobs, key=lambda job: job.due)
                pause = job.due - clock.now()
                if pause > 0:
                    self._ready.wait(pause)
                    continue
            if job.carry_out():
                self._jobs.remove(job)


_canceller = _Canceller()
cancel_later = _canceller.cancel_later
