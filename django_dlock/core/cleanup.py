"""Cancels, in the background, acquires that were not answered, and repeats such releases.

An acquire that was interrupted or not answered may have been granted. Nobody renews such a lease,
so it ends with its TTL at the latest; if it is cancelled, the name is free at once.

An outage must not grow by what it leaves behind. So a request that was never sent leaves nothing;
one thread does everything; an alias that does not answer is asked again after a growing pause, with
one request; and each alias has a queue of limited length. What does not fit into it is dropped:
its lease ends with its TTL.
"""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, field

from .. import clock, process
from ..backends.base import BaseLockBackend
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..lease import LeaseRequest
from . import dispatch

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds until an alias that did not answer is asked again."""
PATIENCE = 60.0
"""A request may wait in a paused server's socket for this much longer than its TTL."""
MOST_QUEUED = 1000
"""Requests of one alias; of more, the oldest are dropped, because their leases end first."""


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    request: LeaseRequest
    min_hold: float
    give_up_at: float

    def carry_out(self, backend: BaseLockBackend) -> BackendUnavailable | None:
        """Returns why there is no answer; ``None`` if the job is done."""
        name, owner, *_ = self.request
        try:
            deadline = backend.call_deadline()
            if self.min_hold:
                backend.release(name, owner, min_hold=self.min_hold, deadline=deadline)
            else:
                backend.cancel_acquire(self.request, deadline=deadline)
        except BackendUnavailable as error:
            return error
        except InvalidLockBackend:
            # It has granted nothing, and the acquire has raised the same error.
            pass
        except BaseException as error:  # noqa: BLE001 - the thread must live
            dispatch.log_error(
                error,
                "Lock %r (alias %r): cleanup failed",
                name,
                backend.alias,
                about=self.request,
                alias=backend.alias,
            )
        return None


@dataclass(slots=True, eq=False, repr=False)
class _Line:
    """The jobs of one backend."""

    backend: BaseLockBackend
    jobs: collections.deque[_Job] = field(default_factory=collections.deque)
    due: float = 0.0
    pause: float = FIRST_PAUSE
    is_full: bool = False

    def add(self, job: _Job) -> None:
        self.jobs.append(job)
        if len(self.jobs) <= MOST_QUEUED:
            return
        self.jobs.popleft()
        if not self.is_full:
            self.is_full = True
            dispatch.log_warning(
                "Alias %r: more than %d requests were not answered; the oldest are not cancelled: "
                "their leases end with their TTL",
                self.backend.alias,
                MOST_QUEUED,
                alias=self.backend.alias,
            )

    def failed(self, job: _Job, error: BackendUnavailable) -> None:
        """Pause, and then begin with another job: this one alone may be refused."""
        now = clock.now()
        self.due, self.pause = now + self.pause, min(self.pause * 2, LONGEST_PAUSE)
        if self.jobs and self.jobs[0] is job:
            self.jobs.rotate(-1)
        late = [each for each in self.jobs if now >= each.give_up_at]
        for each in late:
            self.jobs.remove(each)
        if late:
            dispatch.log_warning(
                "Alias %r: could not cancel %d unanswered acquires or releases, whose leases end "
                "with their TTL: %s",
                self.backend.alias,
                len(late),
                error,
                alias=self.backend.alias,
            )

    def done(self, job: _Job) -> None:
        self.due, self.pause = 0.0, FIRST_PAUSE
        # It may have been dropped meanwhile.
        if self.jobs and self.jobs[0] is job:
            self.jobs.popleft()


class _Canceller:
    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        # Reentrant: a signal handler may interrupt this very thread while it schedules. Entered
        # directly, not through the condition; see core/supervisor.py.
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
        job = _Job(request, min_hold, clock.now() + request.ttl + PATIENCE)
        with self._lock:
            self._lines.setdefault(id(backend), _Line(backend)).add(job)
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
                self._worker, self._lines = None, {}
        job.carry_out(backend)

    def after_fork(self) -> None:
        # The parent cancels its own acquires.
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._lines:
                    self._worker = None
                    return
                line = min(self._lines.values(), key=lambda line: line.due)
                pause = line.due - clock.now()
                if pause > 0:
                    self._ready.wait(pause)
                    continue
                job = line.jobs[0]
            error = job.carry_out(line.backend)
            with self._lock:
                if error is None:
                    line.done(job)
                else:
                    line.failed(job, error)
                if not line.jobs:
                    self._lines.pop(id(line.backend), None)


_canceller = _Canceller()
cancel_later = _canceller.cancel_later


def cancel_unanswered(
    backend: BaseLockBackend, request: LeaseRequest, error: BaseException
) -> None:
    """As ``cancel_later``, after an acquire that ended with this error; nothing if it was not sent.

    An interrupted acquire may still be sent by another thread.
    """
    if not (isinstance(error, BackendUnavailable) and error.unsent):
        cancel_later(backend, request)
