"""A schedule of short ticks; ``celery -A tests.support.tasks_beat beat``, and a worker."""

from __future__ import annotations

import os
import time
from datetime import datetime

from celery import shared_task
from celery.schedules import schedstate, schedule

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, note

__all__ = ["app"]

INTERVAL = 6.0
MIN_HOLD = INTERVAL / 2
LONG = 1.6 * INTERVAL


class At(schedule):
    """Due when the wall clock shows a multiple of the interval, like crontab but in seconds."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        interval = self.run_every.total_seconds()
        now, last = self.now().timestamp(), last_run_at.timestamp()
        return schedstate(now // interval > last // interval, interval - now % interval)


def run(name: str, lasts: float = 0.0) -> None:
    place = os.environ["TASKS_PLACE"]
    note(place, f"began-{name}", time.time())
    time.sleep(lasts)
    note(place, f"ended-{name}", time.time())


@shared_task(base=LockedTask, if_contended="skip", lock_min_hold=MIN_HOLD)
def short() -> None:
    """Ends long before the other beat's message arrives."""
    run("short")


@shared_task(base=LockedTask, if_contended="skip", lock_min_hold=MIN_HOLD)
def long() -> None:
    """Still runs at the next tick."""
    run("long", LONG)


@shared_task(base=LockedTask, if_contended="skip")
def hasty() -> None:
    """Releases its lock as soon as it ends."""
    run("hasty")


@shared_task
def plain() -> None:
    """A task of Celery."""
    run("plain")


@shared_task(base=LockedTask)
def requeued() -> None:
    """With the default, ``if_contended="requeue"``."""
    run("requeued")


@shared_task(base=LockedTask, unique_until="done")
def unique() -> None:
    """Is not published while it is pending."""
    run("unique")


@shared_task(base=LockedTask, idempotency_key="a tick")
def recorded() -> None:
    """Has the same key at each tick."""
    run("recorded")


@shared_task
def often() -> None:
    """Due so often that a test need not wait."""


tasks = (short, long, hasty, plain, requeued, unique, recorded)
app.conf.beat_schedule = {
    task.__name__: {"task": task.name, "schedule": At(INTERVAL)} for task in tasks
} | {"often": {"task": often.name, "schedule": At(0.5)}}
