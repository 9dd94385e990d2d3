"""Celery tasks that run under a lock, and once per key."""

from __future__ import annotations

from typing import Any

from celery import signals

from .. import process
from ..core import watchdog
from . import shutdown
from .checks import log_task_warnings
from .delivery import parked_lock
from .publishing import destination, reservation, tenant
from .task import LockedTask
from .worker import reaping, rights

__all__ = ["LockedTask"]


def _release_all(**_: Any) -> None:
    # Children of a pool end with ``os._exit``, which skips ``atexit``.
    watchdog.shutdown()
    process.run_exit_hooks()


for signal, receivers in (
    (signals.worker_init, (reaping.reap_often, shutdown.begin)),
    (
        signals.worker_ready,
        (destination.on_worker_ready, log_task_warnings, rights.log_missing),
    ),
    (signals.worker_shutting_down, (shutdown.stop,)),
    (signals.worker_process_shutdown, (_release_all,)),
    (signals.before_task_publish, (tenant.carry,)),
    (signals.task_prerun, (tenant.begin,)),
    (signals.task_postrun, (tenant.end,)),
    (signals.task_revoked, (reservation.on_task_over, parked_lock.on_task_revoked)),
    (signals.task_failure, (reservation.on_task_failure,)),
):
    for receiver in receivers:
        signal.connect(receiver, weak=False)
