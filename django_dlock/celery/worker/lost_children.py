"""When the worker's parent recovers the leases of dead children, and what waits for that.

A child's death is noticed twice: by this module, before the pool forks new children; and by
Celery, which searches for dead ones only after that, and reports them to ``LockedRequest``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from celery.worker import state
from kombu.asynchronous import get_event_loop

from ... import clock, process
from ...core import dispatch
from ...log import logger
from .lock_recovery import Recovery, Suspect

AT_ONCE = 0.2
"""Seconds for which the worker's event loop waits for a recovery, if no other one is running."""
POLL_INTERVAL = 0.05
"""Seconds between two checks of a recovery for which a message waits."""

TRIES = 5
"""Attempts to read a set that another thread may be changing."""

Proceed: TypeAlias = Callable[[], object]


@runtime_checkable
class SupervisedRequest(Protocol):
    """A request that can say whether its child has died; in practice a ``LockedRequest``."""

    def found_dead(self) -> Suspect | None: ...


class _Recoveries:
    """Running recoveries and what to do after each; for the worker's event loop thread only."""

    def __init__(self) -> None:
        self._waiting: dict[Recovery, Proceed | None] = {}

    def begin(self, suspect: Suspect | None, proceed: Proceed | None = None) -> None:
        """Recover the suspect's lease, then call ``proceed``; a failed recovery never raises."""
        recovery = None
        try:
            recovery = Recovery(suspect) if suspect is not None else None
        except Exception:
            logger.exception("%s: its lock could not be recovered", suspect, about=suspect)
        if recovery is None:
            if proceed is not None:
                proceed()
            return
        recovery.start()
        hub: Any = get_event_loop()
        if hub is None:
            # Without an event loop this is a thread of the pool, which may wait.
            recovery.go()
            if proceed is not None:
                recovery.wait()
                proceed()
            return
        # Usually wait here: the pool forks a new child next, and on a busy machine that takes
        # longer than these few round trips. Wait for one recovery at a time, so that a backend
        # that does not answer delays the loop only once when many children die.
        # Iterate over a copy: while a pool is closed, another thread runs the timers.
        if recovery.can_begin and all(other.over for other in list(self._waiting)):
            recovery.go()
            if recovery.wait(AT_ONCE):
                _resume(proceed)
                return
        self._waiting[recovery] = proceed
        # Called before the connection is closed; that requeues every unacknowledged message.
        hub.on_close.add(self._finish)
        # Poll with the loop's timers, because a call from another thread may not wake the loop.
        hub.call_later(0, self._poll, hub, recovery)

    def _poll(self, hub: Any, recovery: Recovery) -> None:
        recovery.go()
        if recovery.over:
            self._proceed(recovery)
        else:
            hub.call_later(POLL_INTERVAL, self._poll, hub, recovery)

    def _finish(self, hub: Any) -> None:
        """Wait for all running recoveries, because the loop ends."""
        for recovery in list(self._waiting):
            recovery.go()
        for recovery in list(self._waiting):
            recovery.wait()
            self._proceed(recovery)

    def _proceed(self, recovery: Recovery) -> None:
        # While a pool is closed, the timers run on another thread; only one of the two gets it.
        _resume(self._waiting.pop(recovery, None))


def _resume(proceed: Proceed | None) -> None:
    if proceed is None:
        return
    try:
        proceed()
    except Exception:
        # The pool also logs what its callbacks raise.
        logger.exception("The death of a child process could not be handled")


_recoveries = _Recoveries()
recover = _recoveries.begin

terminated: weakref.WeakSet[SupervisedRequest] = weakref.WeakSet()
"""Requests whose child process is being terminated, until the pool has reaped it."""


def _before_fork() -> None:
    """Before each fork of the pool, recover locks of child processes that have died.

    Celery looks for dead children only after it has forked all new ones. Its own handling of
    them comes later and is not affected.
    """
    try:
        recoveries = [
            recovery
            for request in _requests()
            if isinstance(request, SupervisedRequest) and (recovery := _recover_early(request))
        ]
    except Exception:
        logger.exception("Could not look for dead child processes before a fork")
        return
    ends_at = clock.now() + AT_ONCE
    for recovery in recoveries:
        recovery.wait(max(0.0, ends_at - clock.now()))


def _requests() -> set[object]:
    """All requests that a child of this process may be running."""
    # Before 5.7, after a lost connection to the broker, Celery lists some finished requests as
    # reserved.
    known: set[object] = set()
    for some in (state.reserved_requests, state.active_requests, terminated):
        for _ in range(TRIES):
            try:
                known.update(some)
                break
            except RuntimeError:
                # If a pool forks on its own thread, another thread may be adding a request.
                continue
    return known


def _recover_early(request: SupervisedRequest) -> Recovery | None:
    """Start a recovery before Celery notices the death; ``None`` if the child is alive."""
    try:
        suspect = request.found_dead()
        if suspect is None:
            return None
        recovery = Recovery(suspect)
        recovery.start()
        recovery.go()
    except Exception:
        logger.exception(
            "%s: its lock could not be recovered", request, task_id=getattr(request, "id", None)
        )
        return None
    return recovery


# In this order: hooks run in reverse, so recoveries report their events before ``dispatch`` pauses,
# and the fork waits for their threads.
process.take_part_in_forks()
dispatch.take_part_in_forks()
process.at_fork(before=_before_fork)
