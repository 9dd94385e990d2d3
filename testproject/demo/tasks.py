"""One body, guarded in three ways.

The guards differ and nothing else: the two ``LockedTask`` finish what they began, whatever
becomes of their lease, so that the second column shows the lock alone and the third is decided
by the record alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Task, shared_task
from celery.signals import task_received, worker_ready

from django_dlock import LockedTask
from testproject.shop.models import Effect

from .journal import Journal
from .report import LOCKED, PLAIN, RECORD

__all__ = ["TASKS", "charge", "charge_locked", "charge_plain"]

SHORT = 0.2
"""Seconds that a body takes when its order ran before: what made it slow was slow once."""

journal = Journal(Path(os.environ["DLOCK_DEMO_DIR"]))


def _charge(column: str, task: Task[Any, Any], number: int, work: float, tail: float) -> None:
    with journal.body(column, number) as body:
        # One call that nothing in this process can cut short, as a payment or a query would be.
        time.sleep(work if body.first else SHORT)
        Effect.objects.create(order_number=number, by=column, delivery=task.request.id or "")
        body.note("effect")
        if body.first:
            time.sleep(tail)


# acks_late and reject_on_worker_lost are in the settings: LockedTask sets both for itself, and
# what they do alone is part of what the first column shows.
@shared_task(bind=True)
def charge_plain(self: Task[Any, Any], number: int, work: float, tail: float) -> None:
    """Not guarded."""
    _charge(PLAIN, self, number, work, tail)


@shared_task(base=LockedTask, bind=True, lock_key="locked:{number}", if_lost="finish")
def charge_locked(self: Task[Any, Any], number: int, work: float, tail: float) -> None:
    """Never twice at once, but again for every delivery."""
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
    """Once per order."""
    _charge(RECORD, self, number, work, tail)


TASKS: dict[str, Task[Any, Any]] = {PLAIN: charge_plain, LOCKED: charge_locked, RECORD: charge}
"""The task of each column; the column is its queue, too."""


@task_received.connect
def _count_delivery(request: Any, **_: Any) -> None:
    column = next((name for name, task in TASKS.items() if task.name == request.name), "")
    journal.note("received", column=column)


@worker_ready.connect
def _tell_ready(**_: Any) -> None:
    journal.note("ready")
