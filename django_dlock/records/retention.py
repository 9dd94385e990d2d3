"""Deletes old records, lock events and lock statistics, and records that an operator forgets.

The record of a run that may still be alive is kept. Without it, the next delivery of its key would
start at once, while that run continues.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from django.db import Error, connections, models, router, transaction
from django.utils import timezone

from ..databases.time import Now
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..log import logger
from ..models import Fence, FollowUp, IdempotencyRecord, LockEvent, LockStatistics
from ..operators import audit

State = IdempotencyRecord.State
M = TypeVar("M", bound=models.Model)
Records = models.QuerySet[IdempotencyRecord]


def is_alive(record: IdempotencyRecord) -> bool:
    """Whether the record's run is in progress, according to the lock's backend.

    Raises:
        BackendUnavailable: No answer.
        InvalidLockBackend: The settings do not define the alias any more.
    """
    if record.state != State.RUNNING:
        return False
    info = locks[record.lock_alias].get(record.lock_name)
    return info is not None and info.owner == record.owner and info.holder_state != "dead"


def holds(alias: str, name: str, owner: str) -> bool:
    """Whether the backend says that a run with this owner holds the name now.

    Raises:
        BackendUnavailable: No answer.
        InvalidLockBackend: The settings do not define the alias any more.
    """
    lease = locks[alias].get(name)
    # A parked lease has another owner: its run has ended, and the record waits for the retry.
    return lease is not None and lease.owner == owner and lease.kind == "held"


def may_be_alive(record: IdempotencyRecord, silent: set[str]) -> bool:
    """As ``is_alive``, but also true if it is not known.

    Args:
        silent: Aliases that did not answer; they are not asked again, because each question may
            take a second.
    """
    if record.lock_alias in silent:
        return True
    try:
        return is_alive(record)
    except (BackendUnavailable, InvalidLockBackend):
        silent.add(record.lock_alias)
        return True


def purge(
    *, before: dt.datetime | None = None, batch_size: int = 1000, using: str | None = None
) -> Iterator[int]:
    """Delete records whose retention has ended, in batches of one transaction each.

    Reads the table once, in the order of its primary key, because an index on ``expires_at``
    would be updated with every run.

    Args:
        before: Records that expired before this; the database's present time by default.

    Yields:
        How many records each batch deleted.
    """
    using = using or router.db_for_write(IdempotencyRecord)
    limit = Now() if before is None else before
    expired = IdempotencyRecord.objects.using(using).filter(expires_at__lt=limit)
    silent: set[str] = set()
    for batch in in_batches(expired.defer("message", "result", "error"), batch_size):
        running = [record for record in batch if record.state == State.RUNNING]
        finished = [record.pk for record in batch if record.state != State.RUNNING]
        deleted = delete(expired.filter(pk__in=finished).exclude(state=State.RUNNING))
        for record in running:
            if not may_be_alive(record, silent):
                deleted += delete(record.as_it_was().filter(expires_at__lt=limit))
        yield deleted
    # A pending follow-up is never deleted, even if its record is gone.
    published = FollowUp.objects.using(using).filter(published_at__isnull=False)
    over = published.filter(expires_at__lt=limit)
    for follow_ups in in_batches(over.only("pk"), batch_size):
        over.filter(pk__in=[follow_up.pk for follow_up in follow_ups]).delete()


def purge_events(*, days: float, batch_size: int = 1000, using: str | None = None) -> Iterator[int]:
    """Delete lock events that are older than ``days``, in batches.

    Yields:
        How many events each batch deleted.
    """
    using = using or router.db_for_write(LockEvent)
    before = timezone.now() - dt.timedelta(days=days)
    old = LockEvent.objects.using(using).filter(when__lt=before)
    for batch in in_batches(old.only("pk"), batch_size):
        yield old.filter(pk__in=[event.pk for event in batch]).delete()[0]


def purge_fences(
    *, untouched_for: dt.timedelta, batch_size: int = 1000, using: str | None = None
) -> Iterator[int]:
    """Delete rows of the fence table that no holder has written for so long, in batches.

    A row that a holder writes meanwhile, or has locked in its transaction, stays. Once a row is
    deleted, a holder of an older lease that wakes up later is not refused any more.

    Args:
        untouched_for: At least the largest ``MAX_HOLD``; the caller checks that.

    Yields:
        How many rows each batch deleted.
    """
    using = using or router.db_for_write(Fence)
    old = Fence.objects.using(using).filter(updated_at__lt=Now() - untouched_for)
    for batch in in_batches(old.only("pk"), batch_size):
        yield _delete_matching(old.filter(pk__in=[fence.pk for fence in batch]), "token")


KEPT = {
    LockStatistics.Period.MINUTE: dt.timedelta(hours=2),
    LockStatistics.Period.TEN_MINUTES: dt.timedelta(days=2),
    LockStatistics.Period.HOUR: dt.timedelta(days=14),
}
"""For how long lock statistics of each period are kept: twice what the admin shows of it."""


def purge_statistics(*, using: str | None = None) -> int:
    """Delete old lock statistics; the processes that write them do so now and then.

    Returns:
        How many rows were deleted.
    """
    using = using or router.db_for_write(LockStatistics)
    now, over = time.time(), models.Q()
    for period, kept in KEPT.items():
        over |= LockStatistics.ids(period, 0, int(now - kept.total_seconds()))
    return LockStatistics.objects.using(using).filter(over).delete()[0]


def in_batches(rows: models.QuerySet[M], size: int) -> Iterator[list[M]]:
    """The rows in the order of their primary keys, in lists of at most ``size``."""
    after = rows
    while batch := list(after.order_by("pk")[:size]):
        yield batch
        after = rows.filter(pk__gt=batch[-1].pk)


class Forgotten(NamedTuple):
    """What was deleted with a record."""

    follow_ups: int
    pending: int
    """How many of them no broker had confirmed."""


def forget(records: Records, *, force: bool = False, user: str = "") -> bool:
    """Delete the selected record, if there is one, and its follow-ups; writes a lock event.

    Args:
        force: Delete it even if its run may be in progress, or if follow-ups are pending.
        user: Who wants it, for the lock event.

    Returns:
        Whether it was deleted.
    """
    record = records.first()
    if record is None:
        return False
    if not force and (has_pending(record) or may_be_alive(record, set())):
        return False
    event = router.db_for_write(LockEvent)
    has_events = audit.is_defined(event)
    with transaction.atomic(using=record._state.db):
        forgotten = forget_record(record)
        if forgotten is None:
            return False
        if not has_events:
            return True
        try:
            # A savepoint, if this is the same database.
            with transaction.atomic(using=event):
                note_forgotten(record, forgotten, reason="code", user=user)
        except Error as error:
            # The record is what counts.
            logger.warning(
                "The lock event 'forgotten' of lock %r was not written: %s",
                record.lock_name,
                error,
                name=record.lock_name,
                alias=record.lock_alias,
                owner=record.owner,
                task_id=record.task_id,
            )
    return True


def has_pending(record: IdempotencyRecord) -> bool:
    """Whether a message of a committed run has not been published yet."""
    follow_ups = FollowUp.objects.using(record._state.db)
    return follow_ups.filter(record_id=record.pk, published_at__isnull=True).exists()


def forget_record(record: IdempotencyRecord) -> Forgotten | None:
    """Delete a record and its follow-ups, unless it has changed since it was read.

    A follow-up that is being published at this moment is sent nevertheless.

    Returns:
        ``None`` if it has changed; then nothing was deleted.
    """
    with transaction.atomic(using=record._state.db):
        if not delete(record.as_it_was()):
            return None
        follow_ups = FollowUp.objects.using(record._state.db).filter(record_id=record.pk)
        pending = follow_ups.filter(published_at__isnull=True).delete()[0]
        return Forgotten(pending + follow_ups.delete()[0], pending)


def note_forgotten(
    record: IdempotencyRecord, forgotten: Forgotten, *, reason: str, user: str = ""
) -> None:
    """Write the lock event about a record that was forgotten.

    Raises:
        django.db.Error: It may not have been written.
    """
    audit.record(
        LockEvent.Event.FORGOTTEN,
        name=record.lock_name,
        alias=record.lock_alias,
        owner=record.owner,
        token=record.token,
        reason=reason,
        user=user,
        detail={
            "scope": record.scope,
            "key": record.key,
            "state": record.state,
            "attempt": record.attempt,
            "task_id": record.task_id,
            **forgotten._asdict(),
        },
    )


def delete(records: Records) -> int:
    """Delete those records that still match the query at the moment of their deletion.

    ``QuerySet.delete()`` alone does not guarantee that: with a receiver of ``post_delete``, for
    example, it first reads the primary keys and then deletes by them.

    Returns:
        The number of deleted records.
    """
    return _delete_matching(records, "attempt", wait=True)


def _delete_matching(rows: models.QuerySet[Any], column: str, *, wait: bool = False) -> int:
    """See ``delete``.

    Args:
        column: Any number, to write as it is where rows cannot be locked.
        wait: For rows that other transactions have locked; else they are left out, if the
            database can do that.
    """
    features = connections[rows.db].features
    with transaction.atomic(using=rows.db):
        if features.has_select_for_update:
            skip = not wait and features.has_select_for_update_skip_locked
            keys = list(rows.select_for_update(skip_locked=skip).values_list("pk", flat=True))
        else:
            # After a transaction's first write, no other one can write to a SQLite file.
            rows.update(**{column: models.F(column)})
            keys = list(rows.values_list("pk", flat=True))
        found = rows.model._base_manager.using(rows.db).filter(pk__in=keys)
        _, per_model = found.delete() if keys else (0, {})
    count: int = per_model.get(rows.model._meta.label, 0)
    return count
