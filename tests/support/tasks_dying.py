"""Tasks whose children die; ``celery -A tests.support.tasks_dying worker``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import billiard
from celery import shared_task

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import Lock, LockedTask, app, body, note, wait_for

__all__ = ["app"]


def slow_in_the_parent(order: int, place: str, gate: str) -> str:
    """A key that the worker's parent can compute only when the test allows it, or later."""
    if billiard.current_process().name == "MainProcess":
        note(place, f"looked-for-{order}", os.getpid())
        deadline = time.monotonic() + 10
        while not Path(place, "key").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    return f"order:{order}"


def noted(order: int, place: str) -> str:
    """A key that notes which process computes it."""
    note(place, f"asked-{order}", os.getpid())
    return f"order:{order}"


recorded = {
    "base": LockedTask,
    "bind": True,
    "lock_key": "order:{order}",
    "idempotency_key": "{order}",
    "atomic": True,
}


@shared_task(**recorded)
def charge(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """Lock and record in one transaction; the first run waits for ``gate``."""
    return body(self, order, place, gate=gate)


# Held longer than the hard limit, which would otherwise end the lease at the same moment.
@shared_task(**recorded, lock_max_hold=60)
def deaf(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """As ``charge``, but ignores SIGTERM: it ends only by SIGKILL."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return body(self, order, place, gate=gate)
    finally:
        signal.signal(signal.SIGTERM, before)


@shared_task(**recorded)
def dies(self: LockedTask, order: int, place: str) -> int:
    """Its first run dies in the middle, like a process killed for lack of memory."""
    count = body(self, order, place)
    if count == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return count


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}")
def idles(self: LockedTask, order: int, place: str, gate: str = "", own: str = "") -> int:
    """The lock alone, and no database; the first run may also take a lock of its own."""
    if own and note(place, f"owned-{order}", own) == 1:
        assert Lock(own, bound=False).acquire()
    count = note(place, f"began-{order}", f"{self.request.id} {os.getpid()}")
    if gate and count == 1:
        wait_for(place, gate)
    note(place, f"ended-{order}", self.request.id)
    return count


@shared_task(base=LockedTask, bind=True, lock_key=slow_in_the_parent)
def slow_key(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """The lock alone, with a name that takes the parent a while to compute."""
    count = note(place, f"began-{order}", f"{self.request.id} {os.getpid()}")
    if count == 1:
        wait_for(place, gate)
    return count


@shared_task(base=LockedTask, bind=True, lock_key=noted, if_contended="wait", lock_wait=60)
def waits(self: LockedTask, order: int, place: str) -> int:
    """Waits for its lock within the child."""
    return note(place, f"began-{order}", f"{self.request.id} {os.getpid()}")


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}")
def acquires_again(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """The body releases its lock before its work and acquires it again; the first run waits."""
    lock = self.current_run.lock
    lock.release()
    assert lock.acquire()
    count = note(place, f"began-{order}", f"{self.request.id} {os.getpid()}")
    if gate and count == 1:
        wait_for(place, gate)
    return count
