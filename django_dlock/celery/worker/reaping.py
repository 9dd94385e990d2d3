"""Makes Celery reap the children of a worker every 0.1 s."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from kombu.asynchronous import set_event_loop

PERIOD = 0.1
"""Seconds between two checks of a pool's children; each costs a system call per child."""


def reap_often(sender: Any, **_: Any) -> None:
    """Receives ``worker_init``."""
    sender.app.steps["consumer"].add(ReapChildren)


class ReapChildren(bootsteps.StartStopStep):
    """Check for dead children at short intervals.

    When a child dies, the kernel closes its pipe a moment before the process can be reaped.
    Celery notices the closed pipe, often finds nothing to reap yet, and then checks again only
    after five seconds.

    This is a boot step, because a step starts again with each connection to the broker. When a
    connection is lost, Celery may clear all timers, and kombu forgets the worker's event loop.
    """

    requires = ("celery.worker.consumer:Connection",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._timer: Any = None

    def start(self, parent: Any) -> None:
        self.stop(parent)
        # Without an event loop, a thread of the pool checks.
        if parent.hub is not None:
            set_event_loop(parent.hub)
            self._timer = parent.hub.call_repeatedly(PERIOD, parent.pool.maintain_pool)

    def stop(self, parent: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
