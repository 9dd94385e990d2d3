"""What the record of a key says before a run: the work is done, in progress, or free to begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from celery.exceptions import Ignore
from django.db import Error

from ... import tenancy
from ...databases import errors as database_errors
from ...exceptions import (
    BackendUnavailable,
    DuplicateRun,
    InvalidLockBackend,
    LockError,
    LockNotAcquired,
    RecordedFailure,
)
from ...log import logger
from ...records import idempotency, retention
from ...records.idempotency import ClaimRequest, Ending, Finished, InFlight
from .. import results
from ..options import RecordOptions, TaskWithOptions
from ..publishing.follow_ups import FollowUps
from ..publishing.requeue import Requeue
from . import locking
from .context import DeliveryContext
from .locking import Guard


class UnknownAlias(LockError):
    """The record names a lock whose alias was removed or renamed."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run that is recorded as succeeded ended.

    Attributes:
        value: What the delivery returns.
        ignored: What it raises instead, if the run ended with ``Ignore`` or ``replace()``.
        follow_ups: What this delivery publishes; ``None`` if another delivery does that.
    """

    value: Any = None
    ignored: Ignore | None = None
    follow_ups: FollowUps | None = None


def find_finished(context: DeliveryContext, options: RecordOptions) -> Finished | None:
    """The recorded end of the work, if it is done; for a delivery that did not get its lock.

    Raises:
        PayloadMismatch, DuplicateRun, Exception: See ``idempotency.claim``, ``failure_of_copy``.
        Requeue: Another delivery of this message is running, or the database does not answer.
    """
    try:
        found = idempotency.find_outcome(claim_request(context, options, None), using=options.using)
        if not isinstance(found, InFlight):
            return found
        same_message = found.task_id == context.request.id
        if not same_message or not holds(found.lock_alias, found.lock_name, found.owner):
            return None
    except RecordedFailure as failure:
        raise failure_of_copy(context, failure) from failure
    except BackendUnavailable as error:
        raise Requeue(error, context.header) from error
    except (UnknownAlias, Error) as error:
        requeue_unless_own(context, options, error)
    # The other delivery may have just started; if this one ended, it would overwrite its result.
    reason = LockNotAcquired("The lock is held by someone else", found.lock_name, found.lock_alias)
    raise Requeue(reason, context.header)


def requeue_unless_own(
    context: DeliveryContext, options: RecordOptions, error: UnknownAlias | Error
) -> NoReturn:
    """After a statement that reads or claims the record has failed.

    Raises:
        Requeue: It may succeed later.
        Error: It may not.
    """
    reason: Exception = error
    if isinstance(error, Error):
        if not database_errors.ours_may_succeed(error):
            raise error
        reason = database_errors.explained(error, options.using)
    raise Requeue(reason, context.header) from error


def failure_of_copy(context: DeliveryContext, failure: RecordedFailure) -> Exception:
    """With what a copy fails: with the stored error of its original, else with ``failure``."""
    log_copy(context, failure)
    return results.stored_failure(context.task, context.request) or failure


def log_copy(context: DeliveryContext, failure: Exception) -> None:
    """Log that a delivery does not run, because its message has failed before."""
    logger.info(
        "Task %s[%s] is a copy of a message whose run has failed, so it fails, too: %s",
        context.task.name,
        context.request.id,
        failure,
        about=failure,
        task_id=context.request.id,
    )


def outcome_of_duplicate(
    context: DeliveryContext, options: RecordOptions, finished: Finished, guard: Guard | None = None
) -> RunOutcome:
    """The outcome of a delivery whose work is already done.

    Raises:
        DuplicateRun: Another task did it, and this one has ``if_duplicate="fail"``.
    """
    task, request = context.task, context.request
    logger.info(
        "Task %s[%s] is a duplicate of a run that succeeded",
        task.name,
        request.id,
        about=guard,
        task_id=request.id,
    )
    if finished.task_id == request.id:
        # An earlier delivery of this message may have died before it published them. A delivery
        # of another task must not publish them: the first task may be doing so right now.
        follow_ups = follow_ups_of(task, options, finished.record_id, over=True)
        # The caller of the task may not have its result yet.
        ending = finished.ending
        if not ending and task.store_result and not finished.result:
            # Records of older versions have no ending.
            ending = Ending.IGNORED
        if ending in (Ending.IGNORED, Ending.REPLACED):
            # This delivery must not store a result: a replacement has the same id and does so.
            ignored = Ignore("The work is already done; the run ended with Ignore")
            return RunOutcome(ignored=ignored, follow_ups=follow_ups)
        return RunOutcome(_result_of(context, finished), follow_ups=follow_ups)
    if task.if_duplicate == "skip":
        return RunOutcome()
    if task.if_duplicate == "fail":
        known = claim_request(context, options, guard)
        raise DuplicateRun("The work is already done", known.lock_name, known.lock_alias)
    return RunOutcome(_result_of(context, finished))


def _result_of(context: DeliveryContext, finished: Finished) -> Any:
    return results.decode(finished.result, task=context.task.name, task_id=context.request.id)


def follow_ups_of(
    task: TaskWithOptions, options: RecordOptions, record: int, *, over: bool = False
) -> FollowUps:
    return FollowUps(task, options.using, record, ttl=options.ttl, atomic=task.atomic, over=over)


def claim_request(
    context: DeliveryContext, options: RecordOptions, guard: Guard | None
) -> ClaimRequest:
    args, kwargs = context.args, context.kwargs
    lock_key = context.options.lock_key
    name = ""
    with locking.making_keys(context):
        if guard is None and lock_key is not None:
            name = tenancy.full(lock_key(args, kwargs))
        key, payload = options.key(args, kwargs), options.payload(args, kwargs)
    return ClaimRequest(
        scope=tenancy.full(options.scope),
        key=key,
        payload=payload,
        ttl=options.ttl,
        lock_alias=context.options.lock["using"] if guard is None else guard.alias,
        lock_name=name if guard is None else guard.name,
        owner="" if guard is None else guard.owner or "",
        token=None if guard is None else guard.token,
        task_id=context.request.id or "",
        is_copy=context.is_copy,
        step=context.request.replaced_task_nesting or 0,
        max_attempts=context.task.max_attempts,
        ended=context.header.ended,
    )


def holds(alias: str, name: str, owner: str) -> bool:
    """Whether the backend says that ``owner`` holds the name now.

    Raises:
        BackendUnavailable: No answer.
        UnknownAlias: The alias is not defined any more.
    """
    try:
        return retention.holds(alias, name, owner)
    except InvalidLockBackend as error:
        raise UnknownAlias(
            f"A run is recorded under the alias {alias!r}, which cannot be used any more "
            f"({error}). Define it in DLOCKS until its runs have ended, or forget the record with "
            "force=True",
            name,
            alias,
        ) from error
