"""Tasks that lose their lease while they run; ``celery -A tests.support.tasks_pools worker``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from celery import shared_task

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import Effect, Lock, LockedTask, app, body, note, wait_for

from django.db import connection  # isort: skip

__all__ = ["app"]

recorded = {
    "base": LockedTask,
    "bind": True,
    "lock_key": "order:{order}",
    "idempotency_key": "{order}",
    "atomic": True,
}


@shared_task(**recorded)
def charge(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """Waits in small sleeps; the first run waits for ``gate``."""
    return body(self, order, place, gate=gate)


@shared_task(**recorded, if_lost="finish")
def stubborn(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """As ``charge``, but continues after a loss."""
    return body(self, order, place, gate=gate)


@shared_task(**recorded)
def swallows(self: LockedTask, order: int, place: str) -> int:
    """Catches the interruption three times, and returns as if nothing had happened."""
    count = note(place, f"began-{order}", os.getpid())
    Effect.objects.create(order_number=order, by=self.name, delivery=self.request.id or "")
    while count == 1 and len(swallowed(place, order)) < 3:
        try:
            wait_for(place, "never")
        except Exception as error:  # noqa: PERF203 - this is what bodies do
            note(place, f"swallowed-{order}", type(error).__name__)
    note(place, f"ended-{order}", self.request.id)
    return count


def swallowed(place: str, order: int) -> list[str]:
    path = Path(place, f"swallowed-{order}")
    return path.read_text().splitlines() if path.exists() else []


def in_c(place: str, order: int) -> None:
    """One call into C, until the test opens the pipe for writing."""
    with open(Path(place, "pipe"), "rb"):
        pass


def in_a_query(place: str, order: int) -> None:
    """One query, until the test releases the advisory lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [order])


def in_a_loop(place: str, order: int) -> None:
    """Bytecode that never waits, until the test creates the file, or for a limited time."""
    path, end = Path(place, "loop"), time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        pass


BLOCKED: dict[str, Callable[[str, int], None]] = {
    function.__name__: function for function in (in_c, in_a_query, in_a_loop)
}


def blocked(self: LockedTask, order: int, place: str, how: str, gate: str) -> int:
    count = note(place, f"began-{order}", os.getpid())
    Effect.objects.create(order_number=order, by=self.name, delivery=self.request.id or "")
    if count == 1:
        BLOCKED[how](place, order)
        run = self.current_run
        assert run is not None
        assert run.lock is not None
        note(place, f"lost-{order}", run.lock.lost)
        if gate:
            wait_for(place, gate)
    note(place, f"ended-{order}", self.request.id)
    return count


@shared_task(**recorded)
def blocks(self: LockedTask, order: int, place: str, how: str, gate: str = "") -> int:
    """The first run ignores everything for a while."""
    return blocked(self, order, place, how, gate)


@shared_task(base=LockedTask, lock_key=None)
def forgets(name: str) -> None:
    """Ends without releasing a lock that is bound to its thread."""
    assert Lock(name).acquire()


@shared_task
def leaves(name: str) -> int:
    """Ends without releasing an unbound lock, which the end of its thread does not end."""
    assert Lock(name, ttl=60, bound=False).acquire()
    return os.getpid()


def works(self: LockedTask, order: int, place: str, seconds: float) -> int:
    """Works for so long, without a look at its lock."""
    note(place, f"began-{order}", time.monotonic())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
    return order


limited = shared_task(
    works, base=LockedTask, bind=True, lock_key="order:{order}", time_limit=1, name="limited"
)
"""Its limit may be changed while the worker runs."""
unlimited = shared_task(
    works, base=LockedTask, bind=True, lock_key="order:{order}", name="unlimited"
)
"""Its limit is that of the worker, or of the message."""


@shared_task(name="noise")
def noise() -> None:
    """Nobody runs it."""


@shared_task(**recorded)
def publishes(self: LockedTask, order: int, place: str) -> int:
    """The first run publishes until it is stopped."""
    count = body(self, order, place)
    while count == 1:
        noise.apply_async(queue="noise")
    return count


@shared_task(**recorded)
def retries(self: LockedTask, order: int, place: str) -> int:
    """The first run takes its interruption for an error, as bodies do, and tries again."""
    count = body(self, order, place)
    if count == 1:
        try:
            wait_for(place, "never")
        except Exception as error:
            raise self.retry(exc=error, countdown=0) from error
    return count


@shared_task(**recorded, autoretry_for=(OSError,), retry_kwargs={"countdown": 0})
def autoretries(self: LockedTask, order: int, place: str) -> int:
    """The first run meets the same outage that ends its lease."""
    count = body(self, order, place)
    if count == 1:
        try:
            wait_for(place, "never")
        except Exception:
            raise OSError("Redis is away") from None
    return count
