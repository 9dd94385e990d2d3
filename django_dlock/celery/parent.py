"""What a worker's parent does for the deliveries that its children run.

It makes the owner of each delivery's lease. When a child dies, it has that lease broken before
the message goes back: the new delivery would meet the dead one's lock.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from celery.worker.request import Request
from kombu.asynchronous import get_event_loop

from .. import clock, events, process
from . import callbacks, owners, reservation
from .delivery import OWNER
from .recovery import Recovery, Suspect

__all__ = ["LockedRequest"]

logger = logging.getLogger("django_dlock")

AT_ONCE = 0.2
"""Seconds for which the worker's loop waits for a recovery itself, while no other one lasts."""
LOOK_AGAIN = 0.05
"""Seconds between two looks at a recovery for which a message waits."""

TRIES = 5
"""To read a set that changes meanwhile."""

LARGEST_PID = 2**22
"""What Linux gives out at the most; whatever is larger is a pool's own mark of a greenlet."""

Proceed: TypeAlias = Callable[[], object]


def _in_cold_shutdown() -> bool:
    """Whether Celery would tell nobody of a hard time limit, and acknowledge all the same.

    Left as it is, such a message comes again, as those of all other bodies then do.
    """
    facts: Any = state
    return bool(facts.should_terminate)


class LockedRequest(Request):
    """A message of a ``LockedTask`` in the process that received it.

    Celery tells it of a child that is lost, or that is to be killed, and it only names the
    suspect. What Celery does next about a lost child waits for the recovery, but not for long.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # One that came with the message would be another delivery's.
        super().request_dict.pop(OWNER, None)
        self._owner = owners.new(self.id)
        self._received_by, self._seen_dead = os.getpid(), 0

    @property
    def request_dict(self) -> dict[str, Any]:
        """What the child gets. Not what the parent itself makes messages of: it is unknown to
        Celery, which would publish it as a header."""
        return {**super().request_dict, OWNER: self._owner}

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        """As Celery's; where the child was lost, once its lease is broken or cannot be."""
        proceed = functools.partial(super().on_failure, exc_info, send_failed_event, return_ok)
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, TimeLimitExceeded) and _in_cold_shutdown():
            return
        # Told by the child itself where ``return_ok``: it lives, whatever its body raised.
        if not return_ok:
            self._name_errbacks()
        if not return_ok and isinstance(error, WorkerLostError):
            if not (self.task.acks_late and self.task.reject_on_worker_lost):
                # It will not come again.
                reservation.over(self.task, self._context)  # type: ignore[attr-defined]
            _recoveries.begin(self._suspect(self.worker_pid), proceed)
            return
        if not return_ok and isinstance(error, Terminated | SystemExit | KeyboardInterrupt):
            _recoveries.begin(self._suspect(self.worker_pid))
        proceed()

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """As Celery's; after the hard limit the child is going to be killed."""
        if not soft and _in_cold_shutdown():
            state.task_ready(self)
            _recoveries.begin(self._suspect(self.worker_pid))
            return
        if not soft:
            _recoveries.begin(self._suspect(self.worker_pid))
            self._name_errbacks()
            reservation.over(self.task, self._context)  # type: ignore[attr-defined]
        super().on_timeout(soft, timeout)

    def terminate(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's, which then counts it among its requests no more."""
        _doomed.add(self)
        super().terminate(*args, **kwargs)

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's, which then counts it among its requests no more."""
        _doomed.add(self)
        super().cancel(*args, **kwargs)

    def found_dead(self) -> Suspect | None:
        """This delivery as a suspect, when the child that has it is first seen dead."""
        # What a child inherits of its parent's requests is none of its business.
        if self._received_by != os.getpid():
            return None
        pid: Any = self.worker_pid or self._sent_to()
        suspect = self._suspect(pid) if pid != self._seen_dead else None
        if suspect is None or process.death_proof(suspect.process) is None:
            return None
        self._seen_dead = pid
        return suspect

    def _sent_to(self) -> Any:
        """The pid of the child that the message was written to last, perhaps only in part.

        It may have begun: that its parent has to read, and it does not while it forks.
        """
        reference: Any = getattr(self, "_apply_result", None)
        job = reference() if reference is not None else None
        return getattr(getattr(job, "_write_to", None), "pid", None)

    def _name_errbacks(self) -> None:
        """For a failure that is told from here; never raises."""
        try:
            callbacks.name_errbacks(self.task.app, self._context)  # type: ignore[attr-defined]
        except Exception:
            # What Celery cannot read either is for Celery to tell.
            logger.exception("Task %s[%s]: its errbacks have no ids", self.task.name, self.id)

    def _success_was_stored(self) -> Any:
        """As Celery's, which acknowledges the message then; but not of a member of a chord.

        It is counted after its result is stored, and its child may have died in between.
        """
        return False if self.chord else super()._success_was_stored()  # type: ignore[misc]

    def _suspect(self, pid: Any) -> Suspect | None:
        """This delivery as a suspect in that child; ``None`` where it can hold nothing."""
        task: Any = self.task
        key = task.dlock_options.lock_key
        # Celery accepts in its own name what it never handed to a child, and says of what runs
        # in a greenlet where that lies in memory.
        if key is None or pid in (None, os.getpid()) or pid > LARGEST_PID:
            return None
        owner, child = owners.in_child(self._owner, pid), process.neighbour(pid)
        return Suspect(task, self.id, key, self.args, self.kwargs, owner, child)


class _Recoveries:
    """Those under way, and what waits for each; belongs to the thread of the worker's loop."""

    def __init__(self) -> None:
        self._waiting: dict[Recovery, Proceed | None] = {}

    def begin(self, suspect: Suspect | None, proceed: Proceed | None = None) -> None:
        """Recover what the suspect held, then proceed; never raises on the suspect's account."""
        recovery = None
        try:
            recovery = Recovery(suspect) if suspect is not None else None
        except Exception:
            logger.exception("%s: could not look for what it held", suspect)
        if recovery is None:
            if proceed is not None:
                proceed()
            return
        recovery.start()
        hub: Any = get_event_loop()
        if hub is None:
            # Without a loop this is a thread of the pool's, which may wait.
            recovery.go()
            if proceed is not None:
                recovery.wait()
                proceed()
            return
        # The pool forks a new child next, which takes long where the machine is busy, and these
        # few round trips do not. A backend that does not answer holds the loop up once, and not
        # for each of many children.
        # A copy, for a pool that is being closed has the timers run on another thread.
        if recovery.can_begin and all(other.over for other in list(self._waiting)):
            recovery.go()
            if recovery.wait(AT_ONCE):
                _tell(proceed)
                return
        self._waiting[recovery] = proceed
        # Before the connection is closed, which puts back all that is not acknowledged.
        hub.on_close.add(self._finish)
        # By the loop's timers, for a call from another thread need not wake it.
        hub.call_later(0, self._look, hub, recovery)

    def _look(self, hub: Any, recovery: Recovery) -> None:
        recovery.go()
        if recovery.over:
            self._proceed(recovery)
        else:
            hub.call_later(LOOK_AGAIN, self._look, hub, recovery)

    def _finish(self, hub: Any) -> None:
        """The loop ends: wait here for all that is under way."""
        for recovery in list(self._waiting):
            recovery.go()
        for recovery in list(self._waiting):
            recovery.wait()
            self._proceed(recovery)

    def _proceed(self, recovery: Recovery) -> None:
        # While a pool is closed the timers run on another thread; whoever is first has it.
        _tell(self._waiting.pop(recovery, None))


def _tell(proceed: Proceed | None) -> None:
    if proceed is None:
        return
    try:
        proceed()
    except Exception:
        # As the pool does with what its callbacks raise.
        logger.exception("A request could not be told that its process died")


_recoveries = _Recoveries()

_doomed: weakref.WeakSet[LockedRequest] = weakref.WeakSet()
"""Those whose child was told to end, as long as the pool has not seen that it did."""


def _before_fork() -> None:
    """Free the locks of those who died while the pool forked others, some dozens perhaps.

    Celery does not look for them before it has forked them all. What it does about them then
    stays the same, and finds nothing left to recover.
    """
    try:
        recoveries = [
            recovery
            for request in _requests()
            if isinstance(request, LockedRequest) and (recovery := _ahead(request))
        ]
    except Exception:
        logger.exception("Could not look for those that died before a fork")
        return
    ends_at = clock.now() + AT_ONCE
    for recovery in recoveries:
        recovery.wait(max(0.0, ends_at - clock.now()))


def _requests() -> set[object]:
    """All that a child of this process may be at."""
    # Before 5.7 Celery counts those that run no more among the reserved ones, once the broker's
    # connection was lost.
    known: set[object] = set()
    for some in (state.reserved_requests, state.active_requests, _doomed):
        for _ in range(TRIES):
            try:
                known.update(some)
                break
            except RuntimeError:
                # Where a pool forks on a thread of its own, another one may be adding to it.
                continue
    return known


def _ahead(request: LockedRequest) -> Recovery | None:
    """A recovery that has begun, where one is due that Celery has not asked for yet."""
    try:
        suspect = request.found_dead()
        if suspect is None:
            return None
        recovery = Recovery(suspect)
        recovery.start()
        recovery.go()
    except Exception:
        logger.exception("%s: could not look for what it held", request)
        return None
    return recovery


# In this order: what is freed here is told to receivers before they are kept from going on.
events.hook()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
