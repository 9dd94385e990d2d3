"""Tasks that end in unusual ways, and the messages they send.

Run by ``celery -A tests.support.tasks_endings worker``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from celery import shared_task

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, body, note, wait_for

from django_dlock import locks  # isort: skip
from django_dlock.celery.publishing import follow_ups  # isort: skip

__all__ = ["app"]

recorded: dict[str, Any] = {
    "base": LockedTask,
    "bind": True,
    "lock_key": "order:{order}",
    "idempotency_key": "{order}",
    "atomic": True,
}

_publish = follow_ups.publish


def _publish_or_die(application: Any, messages: Any, using: str) -> int:
    """If a test has created the file, the process ends between COMMIT and publishing."""
    pending = list(messages)
    if pending and os.environ.get("DLOCK_DIES_AT"):
        place = os.environ["DLOCK_DIES_AT"]
        if Path(place, "die").exists() and note(place, "died", os.getpid()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return _publish(application, pending, using)


follow_ups.publish = _publish_or_die


@shared_task(**recorded)
def sends(self: LockedTask, order: int, place: str) -> str:
    """Sends one task with its own record, and one without."""
    count = body(self, order, place)
    self.current_run.send(follower.s(order + 1_000_000, place))
    told.delay_on_commit(order, place)
    return f"run {count}"


@shared_task(**recorded)
def follower(self: LockedTask, order: int, place: str) -> int:
    """Sent by another task."""
    return body(self, order, place)


@shared_task(base=LockedTask, bind=True, lock_key="told:{order}")
def told(self: LockedTask, order: int, place: str) -> None:
    """Notes each run by its id."""
    note(place, f"told-{order}", self.request.id)


@shared_task(**recorded)
def steps(self: LockedTask, order: int, place: str, step: int = 0) -> str:
    """Works in three steps; each replaces the one before."""
    note(place, f"step-{order}", step)
    body(self, order, place)
    if step < 2:
        raise self.replace(self.si(order, place, step + 1))
    return f"done in step {step}"


@shared_task(**recorded, max_attempts=4)
def cancelled(self: LockedTask, order: int, place: str, times: int) -> int:
    """Ends its first runs with an error that is not an ``Exception``."""
    count = body(self, order, place)
    if count <= times:
        raise asyncio.CancelledError(f"run {count}")
    return count


@shared_task(**recorded)
def overruns(self: LockedTask, order: int, place: str) -> None:
    """Never ends by itself."""
    body(self, order, place)
    wait_for(place, "never")


def _lose(self: LockedTask, order: int, place: str) -> None:
    note(place, f"began-{order}", self.request.id)
    lock = self.current_run.lock
    assert locks["default"].break_(lock.name, owner=lock.owner)
    lock.renew()


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}", max_attempts=3)
def loses(self: LockedTask, order: int, place: str) -> None:
    """Loses its lock in every run; there is no record."""
    _lose(self, order, place)


@shared_task(**recorded, max_attempts=3)
def loses_recorded(self: LockedTask, order: int, place: str) -> None:
    """Loses its lock in every run."""
    _lose(self, order, place)


@shared_task(**recorded, if_contended="fail")
def impatient(self: LockedTask, order: int, place: str) -> int:
    """Fails if another task holds its lock."""
    return body(self, order, place)
