"""Tasks that are published once; ``celery -A tests.support.tasks_unique worker``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from celery import shared_task

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, body, note

__all__ = ["app"]


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}", unique_until="start")
def follows(self: LockedTask, order: int, place: str) -> None:
    """Reads the order's state, works for a moment, then notes the state that it read."""
    state = Path(place, f"state-{order}").read_text()
    time.sleep(0.02)
    note(place, f"saw-{order}", state)


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}", unique_until="start")
def starts(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """Can be published again while it waits for the gate."""
    return body(self, order, place, gate=gate)


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}", unique_until="done")
def is_done(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """Cannot be published again before its end."""
    return body(self, order, place, gate=gate)


@shared_task(
    base=LockedTask, bind=True, lock_key="order:{order}", unique_until="done", time_limit=1
)
def hangs(self: LockedTask, order: int, place: str) -> None:
    """Meets its hard time limit."""
    body(self, order, place, gate="never")


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}", unique_until="done")
def dies_once(self: LockedTask, order: int, place: str) -> int:
    """Is killed in its first run, and waits for a gate in its second."""
    if note(place, f"died-{order}", os.getpid()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return body(self, order, place, gate="go")
