"""Tasks that hold and lose locks; ``celery -A tests.support.tasks_alerting worker``."""

from __future__ import annotations

import os
import time

from celery import shared_task

from tests.support.tasks_app import note, wait_for

# Imported from there, because Django must be set up first; it also serves the metrics.
from tests.support.tasks_metrics import app

from django_dlock.core import dispatch  # isort: skip
from tests.support.alerting_site import made  # isort: skip

__all__ = ["app"]


@shared_task
def hold(alias: str, name: str, place: str, options: dict[str, float]) -> str | None:
    """Hold a lock until the test opens the gate ``go``; the reason if it was lost meanwhile."""
    lock = made(name, using=alias, bound=False, **options)
    assert lock.acquire(timeout=10)
    note(place, f"holds-{name}", os.getpid())
    wait_for(place, "go")
    if not lock.lost:
        lock.release()
    return lock.lost_reason


@shared_task
def lose_and_die(name: str) -> None:
    """Lose a lock of a group that nobody has seen before, and die before the next scrape."""
    lock = made(name, bound=False, ttl=0.2, renew=False)
    assert lock.acquire(timeout=10)
    while not lock.lost:
        time.sleep(0.01)
    dispatch.flush()
    os._exit(1)
