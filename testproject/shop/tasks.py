"""The same charge without a lock, with a lock, and with a lock and a record."""

from __future__ import annotations

from typing import Any

from celery import Task, shared_task

from django_dlock import LockedTask

from .models import Effect


def _charge(task: Task[Any, Any], number: int) -> int:
    effect = Effect.objects.create(
        order_number=number, by=task.name, delivery=task.request.id or ""
    )
    return effect.pk


@shared_task(bind=True)
def charge_plain(self: Task[Any, Any], number: int) -> int:
    """Without a lock: charges as often as it is delivered."""
    return _charge(self, number)


@shared_task(base=LockedTask, bind=True, lock_key="order:{number}")
def charge_locked(self: Task[Any, Any], number: int) -> int:
    """With a lock: never two runs at once, but one for every delivery."""
    return _charge(self, number)


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{number}",
    idempotency_key="{number}",
    atomic=True,
)
def charge(self: Task[Any, Any], number: int) -> int:
    """With a lock and a record: once per order, even after redelivery or a killed worker."""
    return _charge(self, number)
