"""A reservation: the lease that stands for a task waiting in a queue.

Its name differs from the lock's, so that one task can run while the next one waits. Its owner
contains the id of the waiting task. It is first granted for a short time, and *confirmed* once the
broker has the message: it then has a long time left. A confirmation is a renewal, which never
revives a lease that has ended. So a publisher that is slower than its worker confirms nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from ... import process
from ...core import cleanup
from ...exceptions import BackendUnavailable
from ...handler import locks
from ...lease import Contention, Lease, LeaseRequest, Outcome, Renewal
from ...log import logger
from ..first_call import FirstCall
from ..options import TaskOptions, TaskWithOptions, UniqueOptions
from .header import RequeueHeader
from .requeue import Republished

UNCONFIRMED = 30.0
"""Seconds that a reservation lives until its message is at the broker."""

BEYOND = 2 * UNCONFIRMED
"""Seconds that a confirmed reservation lives longer than its ``ttl``.

So its remaining time is always longer than that of an unconfirmed one; twice as long, so that a
backend's rounding never confuses the two.
"""


@dataclass(frozen=True, slots=True)
class Reservation:
    """One publisher's reservation for one message.

    Attributes:
        nonce: New for every message, so that a late command for one never affects another.
        ttl: Seconds for which it drops duplicates once it is confirmed.
    """

    alias: str
    name: str
    nonce: str
    task_id: str
    ttl: float

    @classmethod
    def read(cls, task: TaskWithOptions, mark: object, task_id: str | None) -> Reservation | None:
        """The reservation of a message with this mark; ``None`` if the mark is malformed."""
        nonce, _, name = mark.partition(":") if isinstance(mark, str) else ("", "", "")
        if not name:
            return None
        options = task.dlock_options
        # An older version of the task may have published it; it is released all the same.
        ttl = options.unique.ttl if options.unique is not None else UNCONFIRMED
        return cls(options.lock["using"], name, nonce, task_id or "", ttl)

    @property
    def mark(self) -> str:
        """Its text in the message; with its name, because a retry may have other arguments."""
        return f"{self.nonce}:{self.name}"

    @property
    def owner(self) -> str:
        return f"{self.nonce}:{self.task_id}"

    def reserve(self, task_name: str, replaces: str = "") -> Contention | None:
        """Reserve for a short time; returns the reservation that prevents it, if there is one.

        Args:
            replaces: Owner of a reservation that this one may replace.

        Raises:
            BackendUnavailable: No answer; a reservation that was granted is cancelled.
        """
        backend = locks[self.alias]
        facts = json.dumps({"task_name": task_name, "task_id": self.task_id})
        request = LeaseRequest(
            self.name, self.owner, UNCONFIRMED, "reserved", facts, replaces=replaces
        )
        try:
            answer = backend.acquire(request, deadline=backend.call_deadline())
        except BaseException as error:
            cleanup.cancel_unanswered(backend, request, error)
            raise
        return None if isinstance(answer, Lease) else answer

    def is_over(self, met: Contention) -> bool:
        """Whether the reservation that was found had been confirmed, and its ``ttl`` is over.

        Raises:
            BackendUnavailable: No answer.
        """
        if met.kind != "reserved" or met.remaining > BEYOND:
            return False
        if met.remaining > UNCONFIRMED:
            return True
        # Another publisher may have made it just now; but a confirmed one has been renewed.
        lease = locks[self.alias].get(self.name)
        return lease is not None and lease.owner == met.owner and lease.renewals > 0

    def confirm(self) -> Outcome:
        """Let it drop duplicates for ``ttl`` seconds, unless it was released meanwhile.

        Raises:
            BackendUnavailable: No answer; it may or may not be confirmed.
        """
        backend = locks[self.alias]
        renewal = Renewal(self.name, self.owner, self.ttl + BEYOND)
        deadline = backend.call_deadline()
        outcome = backend.renew([renewal], process=process.current().id, deadline=deadline)[
            0
        ].outcome
        if outcome == "unanswered":
            raise BackendUnavailable("It may or may not be confirmed", self.name, self.alias)
        return outcome

    def release(self) -> None:
        """Release it, so that it drops no more duplicates.

        Raises:
            BackendUnavailable: No answer; it may still drop duplicates.
        """
        backend = locks[self.alias]
        backend.release(self.name, self.owner, min_hold=0.0, deadline=backend.call_deadline())

    def release_now_or_later(self) -> None:
        """As ``release``; if the backend does not answer, in the background."""
        try:
            self.release()
        except Exception as error:  # noqa: BLE001 - the task's outcome is decided
            logger.warning(
                "Reservation %r will be released later: %s", self.name, error, about=self
            )
            self.release_later()

    def release_later(self) -> None:
        """Release it in the background; never waits."""
        cleanup.cancel_later(locks[self.alias], LeaseRequest(self.name, self.owner, self.ttl))


def pending_task(met: Contention) -> str:
    """The id of the pending task, if ``met`` is a confirmed reservation; else empty."""
    if met.kind != "reserved" or met.remaining <= BEYOND:
        return ""
    return met.owner.partition(":")[2]


class MessageReservation:
    """The reservation of a delivery's message, if any; a context manager around the delivery.

    It is released before the body begins or when the task is over, and kept if the message is
    delivered again.
    """

    __slots__ = ("_acks_late", "_reservation")

    def __init__(self, reservation: Reservation | None, *, acks_late: bool) -> None:
        self._reservation, self._acks_late = reservation, acks_late

    def release_before_body(self, unique: UniqueOptions | None) -> bool:
        """Release it if ``unique_until="start"``; returns whether it was released now.

        Raises:
            BackendUnavailable: No answer; it may still drop duplicates.
        """
        if self._reservation is None or unique is None or unique.until != "start":
            return False
        self._reservation.release()
        self._reservation = None
        return True

    def __enter__(self) -> MessageReservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._reservation is not None and not self._comes_again(error):
            self._reservation.release_now_or_later()

    def _comes_again(self, error: BaseException | None) -> bool:
        if isinstance(error, Retry):
            # A ``Retry`` raised by hand has published no message.
            return getattr(error, "sig", None) is not None
        if isinstance(error, Ignore):
            return isinstance(error, Republished)
        if isinstance(error, Reject):
            again = bool(getattr(error, "requeue", False))
        else:
            # A worker that is stopped does not acknowledge its messages.
            again = not isinstance(error, Exception | None)
        # A message that was acknowledged before the task began is not redelivered.
        return again and self._acks_late


def on_task_over(sender: Any, request: Context, **_: Any) -> None:
    """Receives ``task_revoked`` in the worker's parent; also called at the hard time limit.

    The task is over, but no delivery of it can release the reservation.
    """
    if isinstance(getattr(sender, "dlock_options", None), TaskOptions):
        reservation = Reservation.read(sender, RequeueHeader.of(request).reserved, request.id)
        if reservation is not None:
            reservation.release_later()


def on_task_failure(sender: Any, **_: Any) -> None:
    """Receives ``task_failure``; releases if the task failed outside its delivery.

    For example because a wrapper passed ``LockedTask`` by. A delivery itself releases its
    reservation.
    """
    request = getattr(sender, "request", None)
    if request is not None and request.id and FirstCall.of(request) is None:
        on_task_over(sender, request)
