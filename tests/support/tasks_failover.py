"""Tasks for workers whose locks fail over; ``celery -A tests.support.tasks_failover worker``."""

from __future__ import annotations

import time

from celery import Task, shared_task

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import Effect, LockedTask, app, note

from django_dlock import clock  # isort: skip

__all__ = ["app"]

WORK = 0.05
"""Seconds that a body takes."""


@shared_task(base=LockedTask, bind=True, lock_key="account:{account}", if_lost="finish")
def locked(self: Task, account: int, place: str, seconds: float = WORK) -> None:
    """The lock alone; notes from when to when this process considered the lock its own."""
    lock = self.current_run.lock
    began = ends = clock.now()
    token, until = lock.token, began + seconds
    note(place, "begun", str(self.request.id))
    while not lock.lost and clock.now() < until:
        time.sleep(0.005)
        ends = clock.now() if not lock.lost else ends
    note(
        place,
        "spans",
        f"{account} {token} {began} {ends} {lock.lost_reason or '-'} {self.request.id}",
    )


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    idempotency_key="{order}",
    atomic=True,
)
def charge(self: Task, order: int, place: str) -> None:
    """Lock and record in one transaction."""
    Effect.objects.create(order_number=order, by=self.name, delivery=self.request.id or "")
    time.sleep(WORK)
