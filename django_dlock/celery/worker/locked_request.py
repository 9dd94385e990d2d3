"""``LockedRequest``: what a worker's parent process does for the tasks of its children.

It chooses the owner of each delivery's lease. When a child dies, it breaks that lease before
Celery requeues the message; otherwise the new delivery would wait for a dead process's lock.
"""

from __future__ import annotations

import os
from typing import Any

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from celery.worker.request import Request

from ... import process, tenancy
from ...log import logger
from .. import owners
from ..canvas import callbacks
from ..publishing import destination, reservation
from ..publishing.header import HEADER, scope_of
from ..publishing.refusal import GivenBack
from ..times import TIME_LIMIT
from . import given_back, lost_children
from .lock_recovery import Suspect

LARGEST_PID = 2**22
"""The largest pid on Linux; a pool of greenlets reports larger numbers instead of pids."""


def _in_cold_shutdown() -> bool:
    """Whether the worker is in a cold shutdown.

    Then Celery would acknowledge a task at its hard time limit without reporting a failure. If
    that is prevented, its message is redelivered, like those of all other running tasks.
    """
    facts: Any = state
    return bool(facts.should_terminate)


class LockedRequest(Request):
    """A message of a ``LockedTask`` in the process that received it.

    Celery calls it when a child is lost or is about to be killed. The request then starts a
    recovery of the child's lease. Celery's own handling of a lost child waits for that recovery,
    but not for long.
    """

    _own_limits: Any = (None, None)
    _given_back: GivenBack | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An owner that arrives in the message belongs to another delivery.
        super().request_dict.pop(owners.KEY, None)
        self._owner = owners.new(self.id)
        self._details = destination.details_of(self.message)
        self._received_by, self._seen_dead = os.getpid(), 0
        if self.delivery_info.get("redelivered") and (header := given_back.header_of(self.id)):
            super().request_dict[HEADER] = header

    @property
    def request_dict(self) -> dict[str, Any]:
        """What the child gets: the request and our own keys.

        The keys are not added to the parent's own copy, because Celery would publish unknown
        keys as headers.
        """
        found = super().request_dict
        told = {**self._details, TIME_LIMIT: self._hard_limit()}
        return {**found, owners.KEY: self._owner, "delivery_info": {**self.delivery_info, **told}}

    @property
    def time_limits(self) -> Any:
        """Hard and soft limit of this delivery in seconds, or ``None``.

        Celery reads the task's own limits once, when the worker starts, and so enforces none that
        ``control.time_limit()`` has set since.
        """
        try:
            hard, soft = self._own_limits
        except (TypeError, ValueError):
            # Whoever publishes may write anything there.
            return self._own_limits
        return hard or self.task.time_limit, soft or self.task.soft_time_limit

    @time_limits.setter
    def time_limits(self, limits: Any) -> None:
        self._own_limits = limits

    def _hard_limit(self) -> float | None:
        """The hard limit that the worker enforces; ``None`` if none is known."""
        pool: Any = getattr(destination.consumer(), "pool", None)
        try:
            limit = self.time_limits[0] or getattr(pool, "options", {}).get("timeout")
            return float(limit) if limit else None
        except (TypeError, ValueError, LookupError):
            return None

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        """As Celery's; for a lost child, after its lease was broken or could not be."""

        def proceed() -> None:
            with tenancy.of_message(self._scope):
                on_failure(exc_info, send_failed_event, return_ok)

        on_failure = super().on_failure
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, TimeLimitExceeded) and _in_cold_shutdown():
            return
        if isinstance(error, GivenBack):
            self._given_back = error
        # With ``return_ok`` the child itself reports the failure, so it is alive.
        if not return_ok:
            self._name_errbacks()
        if not return_ok and isinstance(error, WorkerLostError):
            if self._is_final():
                reservation.on_task_over(self.task, self._context)  # type: ignore[attr-defined]
            lost_children.recover(self._suspect(self.worker_pid), proceed)
            return
        if not return_ok and isinstance(error, Terminated | SystemExit | KeyboardInterrupt):
            lost_children.recover(self._suspect(self.worker_pid))
        proceed()

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """As Celery's, which kills the child after the hard limit; starts a recovery."""
        if not soft and _in_cold_shutdown():
            state.task_ready(self)
            lost_children.recover(self._suspect(self.worker_pid))
            return
        if not soft:
            lost_children.recover(self._suspect(self.worker_pid))
            self._name_errbacks()
            reservation.on_task_over(self.task, self._context)  # type: ignore[attr-defined]
        with tenancy.of_message(self._scope):
            super().on_timeout(soft, timeout)

    def terminate(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's, which then removes it from its sets of requests; ours keeps it."""
        lost_children.terminated.add(self)
        super().terminate(*args, **kwargs)

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        """As ``terminate``."""
        lost_children.terminated.add(self)
        super().cancel(*args, **kwargs)

    def reject(self, requeue: bool = False) -> None:
        """As Celery's; later, if the delivery has ended with ``GivenBack``.

        With SQLAlchemy's transport, it does so on the thread that reads the messages.
        It returns a message through its one session, and SQLAlchemy refuses a session that two
        threads use at once. Celery 5.7 rejects on the thread that saw the child die, logs that
        error, and leaves the message with the worker until it ends.
        """
        consumer: Any = destination.consumer() if requeue else None
        given, self._given_back = self._given_back, None
        if given is not None and consumer is not None:
            given_back.later(consumer, self.id, given, super().reject)
            return
        transport = getattr(getattr(consumer, "connection", None), "transport", None)
        if getattr(transport, "driver_type", "") == "sql":
            consumer.call_soon(super().reject, requeue)
        else:
            super().reject(requeue)

    def found_dead(self) -> Suspect | None:
        """This delivery, once, if the child that runs it has died; else ``None``."""
        # Requests that a child inherits belong to its parent process; skip them.
        if self._received_by != os.getpid():
            return None
        pid: Any = self.worker_pid or self._sent_to()
        suspect = self._suspect(pid) if pid != self._seen_dead else None
        if suspect is None or process.death_proof(suspect.process) is None:
            return None
        self._seen_dead = pid
        return suspect

    def _sent_to(self) -> Any:
        """The pid of the child that the message was last written to, perhaps only in part.

        The child may have started the task: the parent does not read that while it forks.
        """
        reference: Any = getattr(self, "_apply_result", None)
        job = reference() if reference is not None else None
        return getattr(getattr(job, "_write_to", None), "pid", None)

    def _name_errbacks(self) -> None:
        """Give stable ids to the errbacks of a failure that the parent reports; never raises."""
        try:
            callbacks.name_errbacks(self.task.app, self._context)  # type: ignore[attr-defined]
        except Exception:
            # If Celery cannot read them either, it reports that itself.
            logger.exception(
                "Task %s[%s]: its errbacks cannot get stable ids",
                self.task.name,
                self.id,
                task_id=self.id,
            )

    def _success_was_stored(self) -> Any:
        """As Celery's, but ``False`` for a member of a chord; if true, Celery acknowledges.

        A member is counted after its result is stored, and the child may have died in between.
        """
        return False if self.chord else super()._success_was_stored()  # type: ignore[misc]

    def _is_final(self) -> bool:
        """Whether the task fails for good because its child was lost."""
        task, retries = self.task, self._context.retries or 0  # type: ignore[attr-defined]
        if getattr(task, "retry_on_worker_lost", False) and task.max_retries is not None:
            # Since Celery 5.7.
            return bool(retries >= task.max_retries)
        return not (task.acks_late and task.reject_on_worker_lost)

    def _suspect(self, pid: Any) -> Suspect | None:
        """This delivery in that child process; ``None`` if it cannot hold a lease there."""
        task: Any = self.task
        key = task.dlock_options.lock_key
        # Celery reports its own pid for a task that it gave to no child, and a memory address
        # for one that runs in a greenlet.
        if key is None or pid in (None, os.getpid()) or pid > LARGEST_PID:
            return None
        owner, child = owners.in_child(self._owner, pid), process.identity_of(pid)
        return Suspect(task, self.id, key, self.args, self.kwargs, owner, child, self._scope)

    @property
    def _scope(self) -> str:
        """The scope of the message's tenant, for what this process makes and publishes for it."""
        return scope_of(self._context.headers)  # type: ignore[attr-defined]
