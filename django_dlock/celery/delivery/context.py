"""What one delivery knows, and which part of that its body may know.

All parts of a delivery read its ``DeliveryContext``; only ``Delivery`` changes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, Retry, TimeLimitExceeded
from celery.result import AsyncResult

from ... import clock
from ...exceptions import LeaseLost, StaleToken
from ...lock import Lock
from .. import owners, results, times
from ..options import TaskWithOptions
from ..publishing.follow_ups import FollowUps
from ..publishing.header import RequeueHeader, drop_malformed
from . import greenlets
from .interrupt import BodyRunner, LeaseAborted

RUN = "dlock_run"
"""Where the run of a body is kept in the attributes of its request, while it runs."""


@dataclass
class Run:
    """What a body can find out about its own run, as ``self.current_run``.

    Attributes:
        lock: ``None`` for a task without a lock, or if the backend could not be reached.
        scope, key: Of the idempotency record, for requests to services that accept an
            idempotency key; empty without a record.
        attempt: Of the idempotency record; ``None`` without a record.
        follow_ups: Not for bodies; they call ``send``.
    """

    lock: Lock | None = None
    scope: str = ""
    key: str = ""
    attempt: int | None = None
    follow_ups: FollowUps | None = field(default=None, repr=False)

    def send(self, signature: Signature) -> AsyncResult[Any]:
        """Publish a task once this run is committed, even if its worker dies in between.

        The message is recorded in the run's transaction, and published after the commit until
        the broker confirms it: at least once, always with the same task id. If the body is
        rolled back, nothing is sent.

        Raises:
            RuntimeError: The task has no idempotency record, or is not ``atomic``.
            TypeError: It is a canvas, or its arguments cannot be written as JSON.
            ValueError: The message is too large.
        """
        if self.follow_ups is None:
            raise RuntimeError(
                "current_run.send() needs a task with an idempotency_key and atomic=True; "
                "otherwise use delay()"
            )
        return self.follow_ups.send(signature)


class BodyInterrupted(Exception):
    """The body ended with a ``BaseException`` such as ``CancelledError``; it has no result."""


class DeliveryContext:
    """One delivery of a message: its task, its arguments, its owner and its current header.

    Attributes:
        task, request: Celery's.
        args, kwargs: The message's; a body may change them.
        options: The task's.
        run: What the body sees as ``current_run``.
        eager: Whether a caller waits for the result, and there is no message.
        began: When the delivery started, on ``clock.now()``.
        body_runner: Runs the body, and interrupts it if the lease is lost.
        owner: The owner with which the delivery acquires its lock.
        header: The message's header, or the one with which it will be requeued.
        not_acquired: Why the delivery's lock was not acquired, so that it does not run:
            ``contended`` or ``unavailable``, as the metrics count it; else empty.
        is_copy: Whether an earlier delivery of this message, or a copy of it, may have run: the
            broker or we have delivered it again, or it may have been published twice.
    """

    def __init__(
        self,
        task: TaskWithOptions,
        request: Context,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.task, self.request, self.run = task, request, run
        self.args, self.kwargs = args, kwargs
        self.options = task.dlock_options
        self.eager = bool(request.is_eager)
        self.began = clock.now()
        self.not_acquired = ""
        self.body_runner = BodyRunner()
        # A worker's parent makes it, so that it can find the lease of a child that died. An eager
        # task has no worker.
        given: str = vars(request).pop(owners.KEY, "")
        self.owner = owners.in_child(given, os.getpid()) if given else owners.new(request.id)
        drop_malformed(request)
        # Celery treats unknown keys as headers, so a retry would publish this one.
        (request.headers or {}).pop(owners.KEY, None)
        # Read before the body runs: a run ends contention, and so resets the header.
        self.header = RequeueHeader.of(request)
        # Not the key ``redelivered`` of the headers: on Redis, a retry inherits it.
        redelivered = (request.delivery_info or {}).get("redelivered")
        self.is_copy = bool(redelivered) or self.header.count > 0 or self.header.outbox > 0

    @property
    def time_limit(self) -> float | None:
        """The hard time limit, in seconds."""
        return times.time_limit(self.task, self.request)

    def loss_behind(self, error: BaseException) -> LeaseLost | None:
        """The loss of the lease that made the body end with ``error``; ``None`` if none did."""
        runner, lock = self.body_runner, self.run.lock
        if self.task.if_lost == "finish" or lock is None:
            return None
        if isinstance(error, LeaseLost | StaleToken):
            # Count losses of this lock only, not of another lock that the body acquired.
            ours = isinstance(error, LeaseAborted) or (
                (error.name, error.alias) == (lock.name, lock.alias)
            )
        else:
            # A body may turn the interruption into another error, or wrap it.
            ours = runner.interrupted and isinstance(error, Exception)
            ours = ours and not isinstance(error, Ignore | Reject | Retry | TimeLimitExceeded)
        if not ours:
            return None
        reason = runner.reason or lock.lost_reason or "lost"
        return LeaseLost(
            f"The lease was lost while the task was running: {reason}",
            lock.name,
            lock.alias,
            reason,
        )

    def interruption(self, error: BaseException) -> BodyInterrupted | None:
        """The reason to repeat a run that ended with something other than an ``Exception``.

        If Celery got such an error, it would end the process or go unnoticed.
        """
        if self.eager or isinstance(error, Exception | SystemExit | KeyboardInterrupt):
            return None
        if greenlets.is_end(error, self.time_limit):
            return None
        described = self.describe(error) if self.is_private else f"{error!r:.200}"
        return BodyInterrupted(f"The body ended with {described}")

    @property
    def is_private(self) -> bool:
        """Whether neither the arguments may be kept, nor a text that may quote them."""
        return not self.task.store_arguments

    def describe(self, error: BaseException) -> str:
        """The error of a body as text for records and logs; without its own text if private."""
        return results.describe(error, private=self.is_private)
