"""``Run``: what the body of a task can find out about its own run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery.canvas import Signature
from celery.result import AsyncResult

from ...lock import Lock
from ..publishing.follow_ups import FollowUps

__all__ = ["Run"]


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
