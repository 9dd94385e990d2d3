"""How a delivery gets its lock, and what it does when it does not get it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .. import clock, events, signals, undo, watchdog
from ..exceptions import AcquireTimeout, BackendUnavailable, LeaseLost, LockError, LockNotAcquired
from ..handler import locks
from ..lease import Contention, Kind, LeaseRequest
from ..lock import Lock
from . import fallback, owners
from .requeue import PutBack

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = ["Hold", "NoHold", "Skipped", "acquire", "contended", "unavailable"]


KILL_GRACE = 1.0
"""Seconds that a lease may outlive the hard time limit by. Where a worker enforces the limit, the
body is killed under its lease, and not put back for a loss a moment before."""


class Hold(Protocol):
    """What a delivery holds while it runs: a ``Lock``, or what stands for one."""

    @property
    def name(self) -> str: ...
    @property
    def alias(self) -> str: ...
    @property
    def owner(self) -> str | None: ...
    @property
    def token(self) -> int | None: ...
    def release(self) -> None: ...


class NoHold:
    """For a task that excludes nobody."""

    name = alias = ""
    owner = None
    token = None

    def release(self) -> None:
        """There is nothing to release."""


class DeliveryLock(Lock):
    """A lock whose first owner is the delivery's own nonce.

    Where a lease was parked for the task, it takes its place.
    """

    __slots__ = ("_owner", "_replaces")

    def __init__(self, name: str, delivery: Delivery, **options: Any) -> None:
        super().__init__(name, **options)
        self._owner, (self._replaces, _) = delivery.owner, delivery.trail.parked_as

    def _request(self, patience: float | None) -> LeaseRequest:
        request = super()._request(patience)
        if not self._owner:
            return request
        # Once: a body that releases its lock and acquires it again makes another grant of it.
        owner, self._owner = self._owner, ""
        return request._replace(owner=owner, replaces=self._replaces)

    @property
    def ttl(self) -> float:
        """Seconds, as asked for."""
        return self._options.ttl

    def pass_to(self, owner: str, *, kind: Kind, ttl: float) -> None:
        """Let the lease go over to ``owner``, whom nobody renews, and hold it no more.

        Where this raises, what is still held is to be released, and ``owner`` gets nothing.

        Args:
            ttl: Seconds for which ``owner`` is to have it.

        Raises:
            LeaseLost, NotHeld: There is nothing of ours to pass on.
            BackendUnavailable: No answer.
        """
        # A loss that nobody noticed is told now, and not hidden behind a lease that begins anew.
        self.renew()
        hold = self._to_release()
        metadata = self._options.metadata_json
        request = LeaseRequest(self.name, owner, ttl, kind, metadata, replaces=hold.owner)
        # Its next renewal would learn that it has another owner, and be told as a loss.
        watchdog.unwatch(hold)
        try:
            answer = self._backend.acquire(request, deadline=self._backend.call_deadline())
        except BaseException:
            # It may be done or not, and a late packet may do it still. First our own: once the
            # other one is undone nobody remembers that ours was passed on, and not lost.
            try:
                self.release()
            finally:
                undo.schedule(self._backend, request)
            raise
        if isinstance(answer, Contention):
            raise LeaseLost("The lease went to another", self.name, self.alias, "refused")
        if hold.end_released():
            held_for = clock.now() - hold.acquired_at
            events.send(signals.released, Lock, held_for=held_for, reason=kind, **hold.facts())
        self._holdings.drop(hold)


class Skipped(Exception):
    """The delivery ends as a success without a result."""


def acquire(delivery: Delivery) -> Hold:
    """The lock of a delivery, held.

    Raises:
        Skipped, PutBack: As the task's options say for contention and outages.
        LockNotAcquired: Held by another, and the options say to fail.
        BackendUnavailable: No answer, and the options say to fail.
    """
    options = delivery.options
    if options.lock_key is None:
        return NoHold()
    lock = _lock(delivery, options.lock_key(delivery.args, delivery.kwargs))
    # Before it is acquired: there is a moment after it, at which a soft limit may strike.
    delivery.hold = lock
    try:
        granted = lock.acquire() if _waits(delivery) else lock.acquire(blocking=False)
    except LockError as error:
        delivery.hold = None
        if not isinstance(error, BackendUnavailable):
            raise
        if options.if_unavailable != "local":
            unavailable(delivery, error)
        delivery.hold = _locally(delivery, lock)
        return delivery.hold
    if not granted:
        delivery.hold = None
        contended(delivery, lock.name, lock.alias, lock.contention)
    return lock


def contended(delivery: Delivery, name: str, alias: str, contention: Contention | None) -> NoReturn:
    """Do as ``if_contended`` says.

    Args:
        contention: ``None`` where the backend's clock is not known.
    """
    options = delivery.options
    policy = options.if_contended
    if delivery.eager:
        policy = "wait" if policy == "requeue" else policy
    elif policy != "requeue" and _may_be_copy(delivery, name, alias, met=contention):
        # Another delivery of this very task runs, or died a moment ago. Ending this one would
        # lose the task, or overwrite the result of the one that runs.
        policy = "requeue"
    elif policy == "wait" and contention is None:
        # Nothing was waited for: the other one is known from the record, or holds locally.
        policy = "requeue"
    if policy == "skip":
        raise Skipped
    if policy == "wait":
        raise AcquireTimeout("It is held by another for longer than lock_wait", name, alias)
    if policy == "fail":
        raise LockNotAcquired("It is held by another", name, alias)
    trail = delivery.trail
    since = trail.since
    if contention is not None:
        since = contention.now if since is None else since
        # Whom it met does not matter here: many short holders are to end in a time-out, too.
        if contention.now - since >= options.contention_timeout and not _may_be_copy(
            delivery, name, alias
        ):
            raise LockNotAcquired(
                f"It was held by others for {contention.now - since:.0f} s, longer than the "
                f"contention_timeout of {options.contention_timeout:g} s",
                name,
                alias,
            )
    raise PutBack(
        LockNotAcquired("It is held by another", name, alias), replace(trail, since=since)
    )


def unavailable(delivery: Delivery, error: BackendUnavailable) -> NoReturn:
    """Do as ``if_unavailable`` says; ``local`` has no answer here and puts back."""
    policy = delivery.options.if_unavailable
    if policy == "fail":
        raise error
    if policy == "skip":
        raise Skipped from error
    raise PutBack(error, delivery.trail) from error


def _lock(delivery: Delivery, name: str) -> Lock:
    task, request, options = delivery.task, delivery.request, delivery.options
    arguments: dict[str, Any] = dict(options.lock)
    hard_limit = (request.timelimit or (None, None))[0] or task.time_limit
    if hard_limit and not options.max_hold_set:
        arguments["max_hold"] = float(hard_limit) + KILL_GRACE
    return DeliveryLock(
        name,
        delivery,
        metadata={"task_name": task.name, "task_id": request.id},
        on_lost=None if delivery.guard is None else delivery.guard.interrupt,
        # An eager task must not meet the lock of the one before it in the same transaction.
        reentrant=delivery.eager,
        # In eager mode the caller may be in a transaction, of which the body is a part.
        hold_until="commit",
        **arguments,
    )


def _waits(delivery: Delivery) -> bool:
    policy = delivery.options.if_contended
    return policy == "wait" or (delivery.eager and policy == "requeue")


def _locally(delivery: Delivery, lock: Lock) -> Hold:
    answer = fallback.acquire(lock, locks[lock.alias].options.max_hold)
    if isinstance(answer, Contention):
        contended(delivery, lock.name, lock.alias, None)
    return answer


def _may_be_copy(
    delivery: Delivery, name: str, alias: str, *, met: Contention | None = None
) -> bool:
    """Whether the holder is, or may have been, a delivery of the same task id.

    Args:
        met: Where it has to be the very holder that was met.
    """
    told = None if met is None else owners.is_of(met.owner, delivery.request.id)
    if told is not None:
        return told
    try:
        holder = locks[alias].get(name)
    except BackendUnavailable as error:
        raise PutBack(error, delivery.trail) from error
    if holder is None or (met is not None and holder.owner != met.owner):
        # The one that was met is gone, and whose it was is not known any more.
        return True
    return bool(holder.metadata.get("task_id") == delivery.request.id)
