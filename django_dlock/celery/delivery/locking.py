"""Acquires the lock of a delivery; decides what to do under contention or in an outage."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

from django.db import Error

from ... import clock
from ...core import cleanup, fallback, watchdog
from ...databases import errors as database_errors
from ...exceptions import (
    AcquireTimeout,
    BackendUnavailable,
    LeaseLost,
    LockError,
    LockNotAcquired,
)
from ...handler import locks
from ...keys import template_of
from ...lease import Contention, Kind, LeaseRequest
from ...lock import Lock, of_template
from ...log import logger
from ...text.printable import printable
from .. import owners
from ..options import TaskWithOptions
from ..publishing.broker import visibility_timeout
from ..publishing.requeue import Requeue
from .context import DeliveryContext

KILL_GRACE = 1.0
"""Seconds by which a lease outlives the hard time limit. If the lease ended first, a task that the
worker is about to kill would be requeued."""

LEAST_ATTEMPTS = 5
"""Deliveries that must find the name held before ``contention_timeout`` ends a task. Time alone
proves nothing: a dead worker's message may wait for hours before it is redelivered."""

SHORTEST_TIMEOUT = 7200.0
"""The minimum ``contention_timeout`` in seconds, if the task does not set one."""


class DeliveryLock(Lock):
    """A lock that is acquired with the owner that was made for this delivery.

    First it replaces the lease that was parked for the task, if there is one.
    """

    __slots__ = ("_acquires", "_owner", "_replaces")

    def __init__(self, name: str, owner: str, replaces: str = "", **options: Any) -> None:
        super().__init__(name, **options)
        self._owner, self._replaces, self._acquires = owner, replaces, itertools.count()

    def _request(self, *args: Any) -> LeaseRequest:
        request, number = super()._request(*args), next(self._acquires)
        if number:
            return request._replace(owner=owners.again(self._owner, number))
        return request._replace(owner=self._owner, replaces=self._replaces)

    @property
    def ttl(self) -> float:
        """Seconds, as asked for."""
        return self._options.ttl

    def pass_to(self, owner: str, *, kind: Kind, ttl: float) -> None:
        """Pass the lease on to ``owner``; it is not renewed from then on.

        If this raises, release what is still held; ``owner`` gets nothing.

        Args:
            ttl: Seconds for which ``owner`` gets the lease.

        Raises:
            LeaseLost, NotHeld: There is no lease to pass on.
            BackendUnavailable: No answer.
        """
        # Find a loss that was not noticed so far; a new lease would hide it.
        self.renew()
        hold = self._current("passed on")
        held = hold.lease
        metadata = self._options.metadata_json
        request = LeaseRequest(self.name, owner, ttl, kind, metadata, replaces=held.owner)
        # The next renewal would find another owner, and report a loss.
        watchdog.unwatch(held)
        try:
            answer = self._backend.acquire(request, deadline=self._backend.call_deadline())
        except BaseException as error:
            # It may have happened, or may still happen by a late packet. Release ours first:
            # after the other one is cancelled, the backend no longer knows that ours was passed
            # on, and would report it as lost.
            try:
                self.release()
            finally:
                cleanup.cancel_unanswered(self._backend, request, error)
            raise
        if isinstance(answer, Contention):
            raise LeaseLost("Another holder has the lease now", self.name, self.alias, "refused")
        held.end_released(reason=kind)
        self._holds.discard(hold)


@dataclass(frozen=True)
class LocalGuard:
    """A name locked in this process only, or no lock at all; with the attributes of a ``Lock``.

    For ``if_unavailable="local"``, while the backend does not answer, and for tasks without a lock.

    Attributes:
        owner: ``None`` for a task without a lock.
        token: ``None``: a number that only this process knows would fence nothing.
    """

    alias: str = ""
    name: str = ""
    owner: str | None = None
    token: None = None

    def release(self) -> None:
        if self.owner is not None:
            local = fallback.of(locks[self.alias])
            local.release(self.name, self.owner, min_hold=0.0, deadline=clock.now())


Guard: TypeAlias = Lock | LocalGuard
"""What a delivery holds while it runs: a lock of the backend, or a replacement for one."""


class DeliveryRefused(Exception):
    """The delivery ends without a run, as the options say for contention or an outage.

    Attributes:
        answer: The error to fail with; ``None`` to succeed without a result.
    """

    def __init__(self, answer: LockError | None = None) -> None:
        super().__init__(answer)
        self.answer = answer


def acquire(context: DeliveryContext, lock: Guard) -> Guard:
    """Acquire, and return what the delivery now holds: its lock, or a lock of this process.

    Raises:
        DeliveryRefused, Requeue: As the task's options say for contention and outages.
    """
    if isinstance(lock, LocalGuard):
        return lock
    try:
        granted = lock.acquire() if _waits(context) else lock.acquire(blocking=False)
    except BackendUnavailable as error:
        context.not_acquired = "unavailable"
        if context.task.if_unavailable != "local":
            apply_if_unavailable(context, error)
        answer = _acquire_locally(lock, locks[lock.alias].options.max_hold)
        if isinstance(answer, Contention):
            apply_if_contended(context, lock.name, lock.alias)
        context.not_acquired = ""
        return answer
    if not granted:
        context.not_acquired = "contended"
        apply_if_contended(context, lock.name, lock.alias, met=lock.contention)
    return lock


def apply_if_contended(
    context: DeliveryContext,
    name: str,
    alias: str,
    *,
    met: Contention | None = None,
    now: float | None = None,
    copy: bool | None = None,
) -> NoReturn:
    """Do as ``if_contended`` says.

    Args:
        met: The holder that was found, if known.
        now: The time on the clock of the lock's backend, if there is no ``met``.
        copy: Whether the holder is a run of the same task id; ``None`` if that is not known.

    Raises:
        DeliveryRefused, Requeue: As the option says.
    """
    policy = context.task.if_contended
    if context.eager:
        policy = "wait" if policy == "requeue" else policy
    elif policy != "requeue" and (
        _may_be_copy(context, name, alias, met=met) if copy is None else copy
    ):
        # Another delivery of the same message is running, or has just died. If this one ended
        # the task, the task would be lost, or the result of the other one overwritten.
        policy = "requeue"
    elif policy == "wait" and met is None:
        # There was nothing to wait for: the record names the other run, or that one holds the
        # name in this process only.
        policy = "requeue"
    if policy == "skip":
        raise DeliveryRefused
    if policy == "wait":
        text = "The lock is held by someone else for longer than lock_wait"
        raise DeliveryRefused(AcquireTimeout(text, name, alias, _holder_of(name, alias)))
    text = "The lock is held by someone else"
    if policy == "fail":
        raise DeliveryRefused(LockNotAcquired(text, name, alias, _holder_of(name, alias)))
    now = now if met is None else met.now
    header = replace(context.header, contended=context.header.contended + 1)
    if header.since is None:
        header = replace(header, since=now)
    elif now is not None and header.contended >= LEAST_ATTEMPTS:
        lasted, timeout = now - header.since, contention_timeout(context.task)
        # The holder may be another one each time: many short ones lead to a timeout, too.
        if lasted >= timeout and not (_may_be_copy(context, name, alias) if copy is None else copy):
            text = (
                f"The lock was held by someone else for {lasted:.0f} s, longer than the "
                f"contention_timeout of {timeout:g} s"
            )
            raise DeliveryRefused(LockNotAcquired(text, name, alias, _holder_of(name, alias)))
    # A delivery is requeued often, so this asks the backend nothing.
    process = None if met is None else met.process
    holder = "" if process is None else printable(f"process {process.pid} on {process.host}")
    raise Requeue(LockNotAcquired(text, name, alias, holder), header)


def _holder_of(name: str, alias: str) -> str:
    """A description of the present holder; empty if there is none, or it cannot be asked for."""
    try:
        info = locks[alias].get(name)
    except Exception:  # noqa: BLE001 - must not replace the refusal, which it only explains
        return ""
    return "" if info is None else info.holder


def contention_timeout(task: TaskWithOptions) -> float:
    """Seconds after which contention fails a task.

    The default leaves time for a dead worker's message to be redelivered and to run.
    """
    given = task.dlock_options.contention_timeout
    return max(SHORTEST_TIMEOUT, 2 * visibility_timeout(task.app)) if given is None else given


def apply_if_unavailable(context: DeliveryContext, error: BackendUnavailable) -> NoReturn:
    """Do as ``if_unavailable`` says; ``local`` cannot help here and requeues."""
    policy = context.task.if_unavailable
    if policy == "fail":
        raise DeliveryRefused(error) from error
    if policy == "skip":
        raise DeliveryRefused from error
    raise Requeue(error, context.header) from error


def was_outage(reason: Exception) -> bool:
    """Whether a run lost its lease in an outage of the backend, which is not the task's fault."""
    return isinstance(reason, LeaseLost) and reason.reason == "unreachable"


@contextmanager
def making_keys(context: DeliveryContext) -> Iterator[None]:
    """While a key is made from the arguments, whose code may ask a database.

    Raises:
        Requeue: The database is away, or busy. Nothing has run, so the message can wait.
    """
    try:
        yield
    except Error as error:
        if not database_errors.is_away_or_busy(error):
            raise
        raise Requeue(error, context.header) from error


def lock_of(context: DeliveryContext) -> Guard:
    """The lock of a delivery, not yet acquired; an empty one if the task has no lock."""
    task, request, options = context.task, context.request, context.options
    if options.lock_key is None:
        return LocalGuard()
    arguments: dict[str, Any] = dict(options.lock)
    if context.time_limit and "max_hold" not in arguments:
        arguments["max_hold"] = context.time_limit + KILL_GRACE
    replaces, _ = context.header.parked_as
    with making_keys(context):
        name = options.lock_key(context.args, context.kwargs)
    lock = DeliveryLock(
        name,
        context.owner,
        replaces,
        metadata={"task_name": task.name, "task_id": request.id},
        on_lost=context.body_runner.interrupt if task.if_lost == "abort" else None,
        # Two eager tasks in one transaction share the lock, which lasts until the commit.
        reentrant=context.eager,
        # In eager mode the body may be part of its caller's transaction.
        hold_until="transaction",
        # The task's own option says what to do then.
        if_unavailable="raise",
        **arguments,
    )
    return of_template(lock, template_of(options.lock_key))


def _acquire_locally(lock: Lock, ttl: float) -> LocalGuard | Contention:
    """Lock the name within this process, for at most ``ttl`` seconds."""
    backend = locks[lock.alias]
    if fallback.granted_before(backend, lock.name):
        return Contention("", "held", 0.0, 0.0)
    request = LeaseRequest(lock.name, secrets.token_hex(16), ttl)
    answer = fallback.of(backend).acquire(request, deadline=clock.now())
    if isinstance(answer, Contention):
        return answer
    logger.warning(
        "Lock %r (alias %r): the backend does not answer, so the name is locked in this process "
        "only",
        lock.name,
        lock.alias,
        about=lock,
    )
    return LocalGuard(lock.alias, request.name, request.owner)


def _waits(context: DeliveryContext) -> bool:
    policy = context.task.if_contended
    return policy == "wait" or (context.eager and policy == "requeue")


def _may_be_copy(
    context: DeliveryContext, name: str, alias: str, *, met: Contention | None = None
) -> bool:
    """Whether the holder is, or may have been, a delivery of the same task id.

    Args:
        met: The holder that was found; without it, the present holder counts.
    """
    told = None if met is None else owners.is_of(met.owner, context.request.id)
    if told is not None:
        return told
    try:
        holder = locks[alias].get(name)
    except BackendUnavailable as error:
        raise Requeue(error, context.header) from error
    if holder is None or (met is not None and holder.owner != met.owner):
        # The holder is gone, so it is unknown which task it belonged to.
        return True
    return bool(holder.metadata.get("task_id") == context.request.id)
