"""The measured tasks, all with an empty body; ``celery -A benchmarks.tasks worker``.

Two further tasks measure: ``gate`` holds one of the worker's processes or threads until a batch
has been published, and ``mark`` ends the batch. They read the clock in the worker, so that
publishing is not included.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from typing import Any
from urllib.parse import urlsplit

import django
from celery import Celery, current_task, signals

from .peers import DIRECT, POSTGRES

AT_GATE, GATE, ENDS, READY = "bench:at-gate", "bench:gate", "bench:ends", "bench:ready"
"""Lists: when and in which process a gate was passed; what opens it; when a batch ended."""

django.setup()

from django.conf import settings  # noqa: E402
from django.contrib.auth.models import Group  # noqa: E402
from django.db import transaction  # noqa: E402
from redis import Redis  # noqa: E402 - reads by the parser that the settings choose

from django_dlock import LockedTask  # noqa: E402 - needs the settings


def _database(number: int) -> str:
    # Locks, messages and notes in one server, as on most sites, but separate.
    return urlsplit(DIRECT.redis_url)._replace(path=f"/{number}").geturl()


app = Celery("benchmarks")
app.conf.update(
    broker_url=_database(2),
    # Late acknowledgement, which a task that must not be lost needs. The same for all.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    ONCE={
        "backend": "celery_once.backends.Redis",
        "settings": {"url": DIRECT.redis_url, "default_timeout": 3600},
    },
    singleton_backend_url=DIRECT.redis_url,
    singleton_lock_expiry=3600,
)

# Redis answers a gate's BLPOP later than redis-py waits for a reply by default.
notes = Redis.from_url(_database(3), socket_timeout=None)


@app.task
def gate() -> None:
    notes.blpop([GATE], timeout=60)
    notes.rpush(AT_GATE, f"{time.monotonic()!r} {os.getpid()}")


@app.task
def mark() -> None:
    notes.rpush(ENDS, repr(time.monotonic()))


@signals.worker_ready.connect
def _tell_ready(**facts: Any) -> None:
    notes.set(READY, "1")


def nothing(order: int) -> None:
    """The body of all tasks."""


# Celery's type hints know only a decorator.
_task: Any = app.task
_LOCK = {"base": LockedTask, "lock_key": "order:{order}"}

TASKS: dict[str, Any] = {
    "plain": _task(nothing, name="plain"),
    "locked": _task(nothing, name="locked", **_LOCK),
    "recorded": _task(nothing, name="recorded", idempotency_key="{order}", **_LOCK),
}
"""By the name that rows use; peers that are not installed are missing."""


def write(order: int) -> None:
    """The body of tasks that write one row, in the surrounding transaction or in a new one."""
    with transaction.atomic(using=POSTGRES.database):
        Group.objects.using(POSTGRES.database).create(name=f"{current_task.name}:{order}")


if POSTGRES.alias in settings.DLOCKS:
    _STORE = {**_LOCK, "lock_using": POSTGRES.alias}
    _RECORD = {"idempotency_key": "{order}", "idempotency_using": POSTGRES.database}
    TASKS |= {
        "writing": _task(write, name="writing"),
        "writing-locked": _task(write, name="writing-locked", **_STORE),
        "writing-recorded": _task(write, name="writing-recorded", atomic=True, **_STORE, **_RECORD),
    }

for _name, _module, _base in (
    ("once", "celery_once", "QueueOnce"),
    ("singleton", "celery_singleton", "Singleton"),
):
    if importlib.util.find_spec(_module) is not None:
        _class = getattr(importlib.import_module(_module), _base)
        TASKS[_name] = _task(nothing, name=_name, base=_class)
