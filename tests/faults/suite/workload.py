"""The Celery app of the suite's workers; ``celery -A tests.faults.suite.workload worker``.

All kinds of tasks run the same body, with or without a guard. The ``plan`` in the message says
which faults happen to it. Each happens once per key, to the first body that reaches that point.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from celery import Celery, Task, shared_task
from celery.signals import after_task_publish, before_task_publish, task_postrun
from kombu import pools
from kombu.exceptions import OperationalError

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.faults.suite.settings")

app = Celery("faults")
app.config_from_object("django.conf:settings", namespace="CELERY")

from django.apps import apps  # noqa: E402

if not apps.ready:
    import django

    django.setup()

from django.db import connection, transaction  # noqa: E402
from django.dispatch import receiver  # noqa: E402

from django_dlock import LeaseLost, Lock, LockedTask  # noqa: E402
from django_dlock.signals import lost, renewed  # noqa: E402
from testproject.shop.models import Effect  # noqa: E402

from .journal import EVERYBODY, Journal, gate  # noqa: E402
from .kinds import (  # noqa: E402
    FOLLOWER,
    GUARDED,
    HOOK_FOLLOWER,
    LONG_TTL,
    NOISE,
    RECORDED_FOLLOWER,
    SHORT_TTL,
)

SLICE = 0.02
"""Seconds between two checks of the lock."""

LONGEST_HOLD = 60.0


_here = threading.local()
"""``span``: the last body that ran on this thread."""
_spans: WeakValueDictionary[str | None, Span] = WeakValueDictionary()
"""The running bodies, by the owners of their locks."""


@receiver([renewed, lost])
def _on_lost(owner: str, **_: Any) -> None:
    # A body inside a call that cannot be interrupted does not check its lock.
    if span := _spans.get(owner):
        span.check()


class Span:
    """One execution of a body, in the journal."""

    def __init__(self, journal: Journal, lock: Lock | None) -> None:
        self.journal, self.lock = journal, lock
        self.run, self.ended = uuid.uuid4().hex[:12], False
        self.began = self._until = time.monotonic()
        self._held = lock is not None
        if lock is not None:
            _spans[lock.owner] = self
            self.check()

    def note(self, event: str, **facts: Any) -> None:
        self.journal.write(event, run=self.run, **facts)

    def check(self) -> None:
        """Note that the lock is lost, as far as the process knows.

        A body that was stopped past the deadline lost the lock at the deadline, not when it
        continued. A body that was stopped for a shorter time did not lose it.
        """
        if self.lock is None or not self._held:
            return
        now, left = time.monotonic(), self.lock.remaining
        if left > 0:
            self._until = now + left
            return
        self.note("lost", at=min(now, self._until))
        # Set after the line is written. An interrupt in between makes the body note it twice, at
        # worst.
        self._held = False

    def sleep(self, seconds: float) -> None:
        """Work in short slices, so that the body can be interrupted."""
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLICE))
            self.check()

    def hold(self) -> None:
        """Work until somebody ends the body."""
        self.sleep(LONGEST_HOLD)

    def block(self) -> None:
        """The same, in one call that nothing in this process can interrupt."""
        time.sleep(LONGEST_HOLD)

    def wait_at(self, gate: str) -> None:
        """Work until the driver opens a gate."""
        end = time.monotonic() + LONGEST_HOLD
        gates = (gate, EVERYBODY)
        while not any(map(self.journal.is_open, gates)) and time.monotonic() < end:
            self.sleep(SLICE)

    @contextmanager
    def noted(self, **facts: Any) -> Iterator[None]:
        """Write the first and the last line."""
        self.note("begin", at=self.began, pid=os.getpid(), **facts)
        how = "returned"
        try:
            yield
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            self._end(how)

    def _end(self, how: str) -> None:
        try:
            self.check()
            self.end(how)
        except LeaseLost:
            # An interrupt may come at any point, also here, until the body has ended.
            self._end(LeaseLost.__name__)

    def end(self, how: str) -> None:
        self.note("end", how=how)
        self.ended = True


def body(task: Task, kind: str, key: int, plan: dict[str, Any]) -> int:
    """Have an effect in the middle of some work, and do what the plan says."""
    current = task.current_run if isinstance(task, LockedTask) else None
    lock = current.lock if current else None
    journal = Journal(Path(plan["journal"]))
    span = _here.span = Span(journal, lock)
    # Only the first body of a key is slow.
    first = journal.first(f"ran-{kind}-{key}")
    work = plan["work"] if first else plan["again"]
    with span.noted(
        kind=kind,
        key=key,
        long=work > plan["again"],
        delivery=task.request.id,
        token=lock.token if lock else None,
        owner=lock.owner if lock else None,
        attempt=current.attempt if current else None,
    ):
        make_fault("began", kind, key, plan, span)
        span.sleep(work / 2)
        Effect.objects.create(
            order_number=key,
            by=kind,
            delivery=span.run,
            token=lock.token if lock else None,
        )

        def committed() -> None:
            span.note("committed", kind=kind, key=key, token=lock.token if lock else None)
            make_fault("committed", kind, key, plan, span)

        if current is not None:
            for sent in (follower, recorded_follower):
                current.send(sent.si(key, plan).set(queue=plan["queue"]))
        transaction.on_commit(committed)
        if current is not None and plan["hook"]:
            after = follower.si(key, plan, by=HOOK_FOLLOWER).set(queue=plan["queue"])
            # Robust: an error here must not prevent the other receivers.
            transaction.on_commit(after.apply_async, robust=True)
        make_fault("written", kind, key, plan, span)
        span.sleep(work / 2)
    return key


def make_fault(point: str, kind: str, key: int, plan: dict[str, Any], span: Span) -> None:
    """Make the fault that the plan names for this point, if it has not happened for this key."""
    journal = span.journal
    what = plan.get("at", {}).get(point)
    if what is None or not journal.first(f"hit-{kind}-{key}"):
        return
    long = plan["work"] > plan["again"]
    journal.write("hit", kind=kind, key=key, what=what, point=point, long=long)
    if what.startswith("wait"):
        span.wait_at(gate(kind, key))
    if what.endswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "wait":
        pass
    elif what == "hold":
        span.hold()
    elif what == "block":
        span.block()
    elif what == "linger":
        span.sleep(plan["work"])
    elif what == "publish":
        publish_noise(plan["work"])
    else:
        # The proxy sees this before the database; see ``tests/support/proxy.py``.
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT '{what}'")


def publish_noise(seconds: float) -> None:
    """Publish one message after another, as a body that sends many tasks.

    Confirmed: if a publish is interrupted, its connection may not be closed any more.
    """
    end = time.monotonic() + seconds
    confirmed = app.connection_for_write(transport_options={"confirm_publish": True})
    while time.monotonic() < end:
        try:
            with pools.producers[confirmed].acquire(block=True) as producer:
                while time.monotonic() < end:
                    noise.apply_async(queue=NOISE, producer=producer)
        except OperationalError:  # noqa: PERF203 - each is another one
            # To be delivered again, messages of RabbitMQ lose their connection, and so may this
            # one. A body that does not expect that has failed for good.
            continue


@after_task_publish.connect
def _published(sender: str, body: Any, **_: Any) -> None:
    """The point ``published``: the broker has the first follow-up, but no row says so yet."""
    if sender == follower.name:
        _make_senders_fault("published", body)


@before_task_publish.connect
def _publishing(sender: str, body: Any, **_: Any) -> None:
    """The point ``publishing``: the first follow-up is published, the second one is not."""
    if sender == recorded_follower.name:
        _make_senders_fault("publishing", body)


def _make_senders_fault(point: str, body: Any) -> None:
    (key, plan), kwargs, *_ = body
    if kwargs:
        # This is the task of the hook.
        return
    make_fault(point, GUARDED, key, plan, Span(Journal(Path(plan["journal"])), None))


@task_postrun.connect
def _done(args: tuple[Any, ...] | None = None, **_: Any) -> None:
    """The point ``done``: after the result was stored, before the acknowledgement."""
    span: Span | None = vars(_here).pop("span", None)
    if span is not None and not span.ended:
        # An interrupt prevented it from noting its end; now no further interrupt comes.
        span.end(LeaseLost.__name__)
    if args and len(args) == 3:
        kind, key, plan = args
        journal = Journal(Path(plan["journal"]))
        make_fault("done", kind, key, plan, Span(journal, None))


GUARD = {
    "base": LockedTask,
    "bind": True,
    "lock_key": "{key}",
    "idempotency_key": "{key}",
    "idempotency_scope": "suite",
    "idempotency_payload": ["key"],
    "atomic": True,
}


@shared_task(**GUARD, lock_ttl=SHORT_TTL)
def guarded(self: LockedTask, kind: str, key: int, plan: dict[str, Any]) -> int:
    """The end of a lease is part of the fault."""
    return body(self, kind, key, plan)


@shared_task(**GUARD, lock_ttl=LONG_TTL)
def guarded_long(self: LockedTask, kind: str, key: int, plan: dict[str, Any]) -> int:
    """Nobody should have to wait for the end of a lease."""
    return body(self, kind, key, plan)


@shared_task(bind=True, acks_late=True, reject_on_worker_lost=True)
def plain(self: Task, kind: str, key: int, plan: dict[str, Any]) -> int:
    """Not guarded, with the acknowledgement settings of ``LockedTask``."""
    return body(self, kind, key, plan)


@shared_task(bind=True)
def early(self: Task, kind: str, key: int, plan: dict[str, Any]) -> int:
    """Not guarded, with Celery's own defaults: acknowledged before it runs."""
    return body(self, kind, key, plan)


@shared_task(name=NOISE, ignore_result=True)
def noise() -> None:
    """Nobody runs it."""


@shared_task(bind=True, acks_late=True, reject_on_worker_lost=True)
def follower(self: Task, key: int, plan: dict[str, Any], by: str = FOLLOWER) -> None:
    """Sent by a body; writes an event for each of its deliveries."""
    _followed(self, by, key, plan)


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="recorded-follower:{key}",
    lock_ttl=SHORT_TTL,
    idempotency_key="{key}",
    idempotency_payload=["key"],
    atomic=True,
)
def recorded_follower(self: LockedTask, key: int, plan: dict[str, Any]) -> None:
    """The same with its own record, and an effect that must not be doubled."""
    Effect.objects.create(order_number=key, by=RECORDED_FOLLOWER, delivery=self.request.id or "")
    _followed(self, RECORDED_FOLLOWER, key, plan)


def _followed(task: Task, by: str, key: int, plan: dict[str, Any]) -> None:
    # Not a database row: the line must exist as soon as the message does.
    Journal(Path(plan["journal"])).write("followed", by=by, key=key, delivery=task.request.id)
