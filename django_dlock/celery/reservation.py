"""A reservation: the lease by which a task that waits in a queue is known.

Its name is its own and not the lock's, so that one task may run while the next one waits. Its
owner tells the id of the task that waits. It is granted for a short time at first, and prolonged
once the message is at the broker: *confirmed* is what still has a long time to live. A
confirmation is a renewal, because that never brings back what has ended. So a publisher that was
slower than its worker, or that slept, confirms nothing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from .. import process, undo
from ..exceptions import BackendUnavailable
from ..handler import locks
from ..lease import Contention, Fate, Lease, LeaseRequest, Renewal
from . import contention
from .options import TaskOptions
from .requeue import Trail

if TYPE_CHECKING:
    from .delivery import Delivery
    from .task import LockedTask

__all__ = ["Carried", "Reservation", "over", "pending_task"]

logger = logging.getLogger("django_dlock")

UNCONFIRMED = 30.0
"""Seconds for which a publisher reserves, until its message is at the broker."""

BEYOND = 2 * UNCONFIRMED
"""Seconds that a confirmed reservation lives beyond its time, by which it is told from others.

Twice as long, so that no rounding of a backend's makes an unconfirmed one pass for it.
"""


@dataclass(frozen=True, slots=True)
class Reservation:
    """One publisher's reservation for one message.

    Attributes:
        nonce: New for every message, so that a late command of one never concerns another.
        ttl: Seconds for which it may keep others out once it is confirmed.
    """

    alias: str
    name: str
    nonce: str
    task_id: str
    ttl: float

    @classmethod
    def read(cls, task: LockedTask, mark: object, task_id: str | None) -> Reservation | None:
        """The reservation of a message with this mark, if there is one."""
        nonce, _, name = mark.partition(":") if isinstance(mark, str) else ("", "", "")
        if not name:
            return None
        options = task.dlock_options
        # Published by an older version of the task, it is given back all the same.
        ttl = options.unique.ttl if options.unique is not None else UNCONFIRMED
        return cls(options.lock["using"], name, nonce, task_id or "", ttl)

    @classmethod
    def of(cls, task: LockedTask, request: Context) -> Reservation | None:
        """The reservation that the request's message carries, if there is one."""
        return cls.read(task, Trail.of(request).reserved, request.id)

    @property
    def mark(self) -> str:
        """How the message carries it. With its name, for a retry may have other arguments."""
        return f"{self.nonce}:{self.name}"

    @property
    def owner(self) -> str:
        return f"{self.nonce}:{self.task_id}"

    def reserve(self, task_name: str) -> Contention | None:
        """Reserve for a short time; the reservation in the way, if there is one.

        Raises:
            BackendUnavailable: No answer; what may have been granted is taken back.
        """
        backend = locks[self.alias]
        facts = json.dumps({"task_name": task_name, "task_id": self.task_id})
        request = LeaseRequest(self.name, self.owner, UNCONFIRMED, "reserved", facts)
        try:
            answer = backend.acquire(request, deadline=backend.call_deadline())
        except BaseException:
            undo.schedule(backend, request)
            raise
        return None if isinstance(answer, Lease) else answer

    def confirm(self) -> Fate:
        """Let it drop duplicates for ``ttl`` seconds, if it was not given back meanwhile.

        Raises:
            BackendUnavailable: It is confirmed or it is not.
        """
        backend = locks[self.alias]
        renewal = Renewal(self.name, self.owner, self.ttl + BEYOND)
        deadline = backend.call_deadline()
        return backend.renew([renewal], process=process.current().id, deadline=deadline)[0]

    def release(self) -> None:
        """Give it back; afterwards it drops nobody any more, whoever had it.

        Raises:
            BackendUnavailable: It may still drop others.
        """
        backend = locks[self.alias]
        backend.release(self.name, self.owner, min_hold=0.0, deadline=backend.call_deadline())

    def give_back(self) -> None:
        """As ``release``; without an answer, in the background."""
        try:
            self.release()
        except Exception as error:  # noqa: BLE001 - what becomes of the task is decided
            logger.warning("Reservation %r is given back later: %s", self.name, error)
            self.give_back_soon()

    def give_back_soon(self) -> None:
        """Give it back in the background; never waits."""
        undo.schedule(locks[self.alias], LeaseRequest(self.name, self.owner, self.ttl))


def pending_task(met: Contention) -> str:
    """The id of the task that a confirmed reservation stands for; else empty."""
    if met.kind != "reserved" or met.remaining <= BEYOND:
        return ""
    return met.owner.partition(":")[2]


class Carried:
    """The reservation of a delivery's message, if any; a context manager of one delivery.

    It is given back before the body begins, or when the task is over, and kept where its message
    comes again.

    Attributes:
        put_back: Whether the delivery is being put back.
    """

    # The delivery is not kept: what knows each other waits for the garbage collector.
    __slots__ = ("_acks_late", "_reservation", "put_back")

    def __init__(self, delivery: Delivery) -> None:
        self._acks_late = bool(delivery.task.acks_late)
        self._reservation: Reservation | None = None
        if not delivery.eager:
            mark, task_id = delivery.trail.reserved, delivery.request.id
            self._reservation = Reservation.read(delivery.task, mark, task_id)
        self.put_back = False

    def before_the_body(self, delivery: Delivery) -> None:
        """With ``unique_until="start"``, let others be published from now on.

        What was written before an enqueue that is dropped must be seen by the body. So it must
        not begin while that is in doubt.

        Raises:
            PutBack, Skipped, BackendUnavailable: No answer; see ``contention.unavailable``.
        """
        unique = delivery.options.unique
        if self._reservation is None or unique is None or unique.until != "start":
            return
        try:
            self._reservation.release()
        except BackendUnavailable as error:
            contention.unavailable(delivery, error)
        self._reservation = None
        delivery.trail = replace(delivery.trail, reserved="")

    def __enter__(self) -> Carried:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._reservation is not None and not self._comes_again(error):
            self._reservation.give_back()

    def _comes_again(self, error: BaseException | None) -> bool:
        if isinstance(error, Retry):
            # Raised by hand it has no message.
            return getattr(error, "sig", None) is not None
        if isinstance(error, Ignore):
            return self.put_back
        if isinstance(error, Reject):
            again = bool(getattr(error, "requeue", False))
        else:
            # A worker that stops acknowledges nothing.
            again = not isinstance(error, Exception | None)
        # One that was acknowledged before it began is gone.
        return again and self._acks_late


def over(sender: Any, request: Context, **_: Any) -> None:
    """Receives ``task_revoked`` in the worker's parent, and is told of the hard time limit.

    The task is over, and no delivery says so.
    """
    if isinstance(getattr(sender, "dlock_options", None), TaskOptions):
        reservation = Reservation.of(sender, request)
        if reservation is not None:
            reservation.give_back_soon()
