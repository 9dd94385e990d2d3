"""Celery tasks that run under a lock, and once per key."""

from __future__ import annotations

from typing import Any

from celery import signals

from .. import watchdog
from . import deaths, parked, reservation
from .checks import register
from .task import LockedTask

__all__ = ["LockedTask"]


def _give_back(**_: Any) -> None:
    # Children of a pool end by ``os._exit`` and run no ``atexit``.
    watchdog.shutdown()


signals.worker_process_shutdown.connect(
    _give_back, dispatch_uid="django_dlock.celery.give_back", weak=False
)
signals.task_revoked.connect(
    reservation.over, dispatch_uid="django_dlock.celery.reservation", weak=False
)
signals.task_revoked.connect(parked.revoked, dispatch_uid="django_dlock.celery.parked", weak=False)
deaths.connect()
register()
