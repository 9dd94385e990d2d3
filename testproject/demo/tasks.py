"""The same body without a lock, with a lock, and with a lock and a record.

Nothing else differs. Both ``LockedTask`` continue even if they lose their lease, so that the second
column shows what the lock alone does, and the third what the record does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Task, shared_task
from celery.signals import task_postrun, task_received, worker_ready

from django_dlock import LockedTask
from testproject.shop.models import Effect

from .journal import Journal
from .report import LOCKED, PLAIN, RECORD
from .stream import SHORT

journal = Journal(Path(os.environ["DLOCK_DEMO_DIR"]))


def _charge(column: str, task: Task[Any, Any], number: int, work: float, tail: float) -> None:
    with journal.body(column, number) as body:
        # One call that cannot be interrupted, like a payment or a query. Only the first run of an
        # order is slow.
        time.sleep(work if body.first else SHORT)
        Effect.objects.create(order_number=number, by=column, delivery=task.request.id or "")
        body.note("effect")
        if body.first:
            time.sleep(tail)


# acks_late and reject_on_worker_lost are in the settings, so that plain Celery has them, too;
# LockedTask sets both itself.
@shared_task(bind=True)
def charge_plain(self: Task[Any, Any], number: int, work: float, tail: float) -> None:
    """Without a lock."""
    _charge(PLAIN, self, number, work, tail)


@shared_task(base=LockedTask, bind=True, lock_key="locked:{number}", if_lost="finish")
def charge_locked(self: Task[Any, Any], number: int, work: float, tail: float) -> None:
    """With a lock: never two runs at once, but one for every delivery."""
    _charge(LOCKED, self, number, work, tail)


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{number}",
    idempotency_key="{number}",
    atomic=True,
    if_lost="finish",
)
def charge(self: Task[Any, Any], number: int, work: float, tail: float) -> None:
    """With a lock and a record: once per order."""
    _charge(RECORD, self, number, work, tail)


TASKS: dict[str, Task[Any, Any]] = {PLAIN: charge_plain, LOCKED: charge_locked, RECORD: charge}
"""The task of each column; the column is also the name of its queue."""


@task_received.connect
def _count_delivery(request: Any, **_: Any) -> None:
    column = next((name for name, task in TASKS.items() if task.name == request.name), "")
    journal.note("received", column=column)


@task_postrun.connect
def _tell_done(task_id: str = "", state: str = "", **_: Any) -> None:
    # Not for a message that is requeued.
    if state in ("SUCCESS", "FAILURE"):
        journal.note("done", run=task_id)


@worker_ready.connect
def _tell_ready(**_: Any) -> None:
    journal.note("ready")
