"""Lets a worker notice the death of a child in time."""

from __future__ import annotations

from typing import Any

from celery import bootsteps, signals
from kombu.asynchronous import set_event_loop

__all__ = ["connect"]

PERIOD = 0.1
"""Seconds between two looks at a pool's children; each costs a system call per child."""


def connect() -> None:
    """Look in every worker of this process."""
    signals.worker_init.connect(_add, dispatch_uid="django_dlock.celery.deaths", weak=False)


def _add(sender: Any, **_: Any) -> None:
    sender.app.steps["consumer"].add(LookOften)


class LookOften(bootsteps.StartStopStep):
    """Reap dead children every now and then.

    The kernel closes the pipe by which Celery is told of a death a moment before the process
    can be reaped. Celery often looks within that moment, and then not for five seconds.

    A step, for it starts again with each connection to the broker: as one is lost, Celery may
    clear all timers, and kombu forgets which loop is the worker's.
    """

    requires = ("celery.worker.consumer:Connection",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._timer: Any = None

    def start(self, parent: Any) -> None:
        self.stop(parent)
        # Without a loop, a pool has a thread that looks.
        if parent.hub is not None:
            set_event_loop(parent.hub)
            self._timer = parent.hub.call_repeatedly(PERIOD, parent.pool.maintain_pool)

    def stop(self, parent: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
