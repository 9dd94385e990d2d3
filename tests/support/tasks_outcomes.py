"""Tasks whose first run ends as the test says.

Run by ``celery -A tests.support.tasks_outcomes worker``.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from celery import Task, shared_task
from celery.exceptions import Ignore, Reject
from celery.signals import task_prerun
from django.db import connection

from django_dlock import LeaseLost, locks

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, body, collect, note, wait_for

__all__ = ["app"]


class Outcome(LockedTask):
    """Its deliveries are noted by ``_arrives``."""


@task_prerun.connect
def _arrives(task: Task, args: Any, **_: Any) -> None:
    """Notes how a delivery arrived. All but the first wait, before lock and record, until the test
    has checked the state after the first one."""
    if not isinstance(task, Outcome):
        return
    order, place = args[:2]
    request = task.request
    came = {
        "retries": request.retries,
        "redelivered": bool((request.delivery_info or {}).get("redelivered")),
        "requeued": ((request.headers or {}).get("django_dlock") or {}).get("count", 0),
    }
    if note(place, f"came-{order}", json.dumps(came)) > 1:
        wait_for(place, "again")


def _raise(error: Exception) -> NoReturn:
    raise error


def _lost(task: Outcome, order: int, place: str) -> None:
    """The test breaks the lock; the body notices it and continues."""
    wait_for(place, "broken")
    with suppress(LeaseLost):
        task.current_run.lock.renew()
    wait_for(place, "never")


def _lost_unseen(task: Outcome, order: int, place: str) -> None:
    # Long before the next renewal.
    lock = task.current_run.lock
    assert locks["default"].break_(lock.name, owner=lock.owner)


def _commit(task: Outcome, order: int, place: str) -> None:
    """Names the next COMMIT, so that the test's proxy recognizes it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 'outcome: COMMIT'")


def _deaf(task: Outcome, order: int, place: str) -> None:
    """It ends only by SIGKILL."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_for(place, "never")


def _retry_and_die(task: Outcome, order: int, place: str) -> None:
    task.retry(countdown=0, throw=False)
    os.kill(os.getpid(), signal.SIGKILL)


ENDINGS: Mapping[str, Callable[[Outcome, int, str], object]] = {
    "return": lambda task, order, place: None,
    "exception": lambda task, order, place: _raise(RuntimeError("no")),
    "retry": lambda task, order, place: task.retry(countdown=0),
    "late retry": lambda task, order, place: task.retry(countdown=2),
    "autoretry": lambda task, order, place: _raise(ValueError("again")),
    "no autoretry": lambda task, order, place: _raise(UnicodeError("no")),
    "retry for a reason": lambda task, order, place: task.retry(exc=KeyError("no")),
    "retry, and die": _retry_and_die,
    "Ignore": lambda task, order, place: _raise(Ignore()),
    "replace": lambda task, order, place: task.replace(collect.si("replaced", place, order)),
    "Reject, requeue": lambda task, order, place: _raise(Reject("not now", requeue=True)),
    "Reject": lambda task, order, place: _raise(Reject("no", requeue=False)),
    "waits, deaf": _deaf,
    "waits": lambda task, order, place: wait_for(place, "never"),
    "lost": _lost,
    "lost unseen": _lost_unseen,
    "commit": _commit,
    "killed": lambda task, order, place: os.kill(os.getpid(), signal.SIGKILL),
}

options: dict[str, Any] = {
    "base": Outcome,
    "bind": True,
    "lock_key": "order:{order}",
    "autoretry_for": (ValueError,),
    "dont_autoretry_for": (UnicodeError,),
    "retry_kwargs": {"countdown": 0},
}


def run(task: Outcome, order: int, place: str, how: str) -> int:
    count = body(task, order, place)
    if count == 1:
        ENDINGS[how](task, order, place)
    return count


@shared_task(**options, idempotency_key="{order}", atomic=True)
def recorded(self: Outcome, order: int, place: str, how: str) -> int:
    """Lock and record."""
    return run(self, order, place, how)


@shared_task(**options)
def alone(self: Outcome, order: int, place: str, how: str) -> int:
    """The lock alone; each statement is a separate transaction."""
    return run(self, order, place, how)


@shared_task(**options, idempotency_key="{order}", atomic=True, lock_across_retries=True)
def keeps(self: Outcome, order: int, place: str, how: str) -> int:
    """Its lock is kept through the countdowns of retries."""
    return run(self, order, place, how)


@shared_task(
    **options,
    idempotency_key="{order}",
    atomic=True,
    retry_on_worker_lost=True,
    default_retry_delay=0,
)
def comes_again(self: Outcome, order: int, place: str, how: str) -> int:
    """The worker retries it when its child dies, in versions of Celery that do so."""
    return run(self, order, place, how)
