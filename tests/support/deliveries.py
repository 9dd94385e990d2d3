"""Deliveries as a worker makes them, in this process: a broker in memory, locks on ``local``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery.worker.request import Request
from django.test import override_settings

from django_dlock import Lock, LockedTask
from django_dlock.models import IdempotencyRecord
from testproject.shop.models import Effect

numbers = itertools.count()


@contextmanager
def in_memory() -> Iterator[Celery]:
    """An app with its own queue; the default alias is in memory and empty."""
    app = Celery("deliveries", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = f"deliveries-{next(numbers)}"
    entry = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
    with override_settings(DLOCKS={"default": entry}):
        yield app


def task(app: Celery, function: Any = None, **options: Any) -> Any:
    def body(self, order: int, note: str = "") -> int:
        Effect.objects.create(order_number=order, by=self.name[:40])
        return order

    usual = {"base": LockedTask, "lock_key": "order:{order}", "bind": True, "lazy": False}
    name = f"deliveries.t{next(numbers)}"
    return app.task(name=name, shared=False, **{**usual, **options})(function or body)


def recorded(app: Celery, function: Any = None, **options: Any) -> Any:
    return task(app, function, **{"idempotency_key": "{order}", "atomic": True, **options})


def waiting(app: Celery) -> Any:
    """The next message of the queue, or ``None``."""
    with app.connection_for_read() as connected:
        queue = app.amqp.queues[app.conf.task_default_queue](connected.default_channel)
        return queue.get(no_ack=True)


def work(app: Celery, *, redelivered: bool = False) -> Any:
    """Deliver the next message to a worker's own code; return the message.

    Args:
        redelivered: Whether the broker says that it may have been delivered before.
    """
    message = waiting(app)
    assert message is not None
    message.delivery_info["redelivered"] = redelivered
    made = app.tasks[message.headers["task"]]
    Request(message, app=app, task=made, on_ack=lambda *_: None).execute()
    return message


@contextmanager
def held(name: str) -> Iterator[None]:
    """Held by another owner."""
    lock = Lock(name, bound=False)
    assert lock.acquire(blocking=False)
    yield
    lock.release()


def effects() -> int:
    return Effect.objects.count()


def states() -> list[str]:
    return list(IdempotencyRecord.objects.values_list("state", flat=True))
