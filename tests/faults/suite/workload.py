"""The Celery app of the suite's workers; ``celery -A tests.faults.suite.workload worker``.

One body, guarded in one way or in none. What happens to it stands in the ``plan`` that travels
with the message, and happens once per key: to the first body that comes to the place.
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
    RECORDED_FOLLOWER,
    SHORT_TTL,
)

SLICE = 0.02
"""Seconds between two looks at the lock."""

LONGEST_HOLD = 60.0


_here = threading.local()
"""``span``: the body that ran last on this thread."""
_spans: WeakValueDictionary[str | None, Span] = WeakValueDictionary()
"""The bodies that run, by the owners of their locks."""


@receiver([renewed, lost])
def _told(owner: str, **_: Any) -> None:
    # A body in a call that nothing interrupts does not look at its lock.
    if span := _spans.get(owner):
        span.look()


class Span:
    """One execution of a body, in the journal."""

    def __init__(self, journal: Journal, lock: Lock | None) -> None:
        self.journal, self.lock = journal, lock
        self.run, self.ended = uuid.uuid4().hex[:12], False
        self.began = self._until = time.monotonic()
        self._held = lock is not None
        if lock is not None:
            _spans[lock.owner] = self
            self.look()

    def note(self, event: str, **facts: Any) -> None:
        self.journal.write(event, run=self.run, **facts)

    def look(self) -> None:
        """Note that the lock is lost, as far as the process knows.

        Whoever was stopped past the deadline lost it there, and not when it woke up; whoever
        was stopped for a shorter time had it all the while.
        """
        if self.lock is None or not self._held:
            return
        now, left = time.monotonic(), self.lock.remaining
        if left > 0:
            self._until = now + left
            return
        self.note("lost", at=min(now, self._until))
        # After the line: struck in between, the body looks again and notes it twice at worst.
        self._held = False

    def sleep(self, seconds: float) -> None:
        """Work; in short slices, so that the body can be interrupted."""
        end = time.monotonic() + seconds
        self.look()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLICE))
            self.look()

    def hold(self) -> None:
        """Work until somebody ends it."""
        self.sleep(LONGEST_HOLD)

    def block(self) -> None:
        """The same, in one call that nothing in this process can cut short."""
        time.sleep(LONGEST_HOLD)

    def wait_at(self, gate: str) -> None:
        """Work until the driver opens a gate."""
        end = time.monotonic() + LONGEST_HOLD
        gates = (gate, EVERYBODY)
        while not any(map(self.journal.is_open, gates)) and time.monotonic() < end:
            self.sleep(SLICE)

    @contextmanager
    def noted(self, **facts: Any) -> Iterator[None]:
        """The first and the last line."""
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
            self.look()
            self.end(how)
        except LeaseLost:
            # It strikes wherever the body is, also here, until the body has ended.
            self._end(LeaseLost.__name__)

    def end(self, how: str) -> None:
        self.note("end", how=how)
        self.ended = True


def body(task: Task, kind: str, key: int, plan: dict[str, Any]) -> int:
    """An effect in the middle of some work, and what the plan says."""
    current = task.current_run if isinstance(task, LockedTask) else None
    lock = current.lock if current else None
    journal = Journal(Path(plan["journal"]))
    span = _here.span = Span(journal, lock)
    # What made it slow was slow once.
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
        strike("began", kind, key, plan, span)
        span.sleep(work / 2)
        Effect.objects.create(
            order_number=key,
            by=kind,
            delivery=span.run,
            token=lock.token if lock else None,
        )

        def committed() -> None:
            span.note("committed", kind=kind, key=key, token=lock.token if lock else None)
            strike("committed", kind, key, plan, span)

        if current is not None:
            for sent in (follower, recorded_follower):
                current.send(sent.si(key, plan).set(queue=plan["queue"]))
        transaction.on_commit(committed)
        if current is not None and plan["hook"]:
            after = follower.si(key, plan, by=HOOK_FOLLOWER).set(queue=plan["queue"])
            # Robust: its failure is not to be that of the others, too.
            transaction.on_commit(after.apply_async, robust=True)
        strike("written", kind, key, plan, span)
        span.sleep(work / 2)
    return key


def strike(place: str, kind: str, key: int, plan: dict[str, Any], span: Span) -> None:
    """Do what the plan says for this place, if nobody has for this key."""
    journal = span.journal
    what = plan.get("at", {}).get(place)
    if what is None or not journal.first(f"struck-{kind}-{key}"):
        return
    long = plan["work"] > plan["again"]
    journal.write("struck", kind=kind, key=key, what=what, place=place, long=long)
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
    else:
        # Heard by the proxy before the database; see ``tests/support/proxy.py``.
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT '{what}'")


@after_task_publish.connect
def _published(sender: str, body: Any, **_: Any) -> None:
    """The place ``published``: the broker has the first follow-up, and no row says so."""
    if sender == follower.name:
        _strike_sender("published", body)


@before_task_publish.connect
def _publishing(sender: str, body: Any, **_: Any) -> None:
    """The place ``publishing``: the second follow-up is not published, the first one is."""
    if sender == recorded_follower.name:
        _strike_sender("publishing", body)


def _strike_sender(place: str, body: Any) -> None:
    (key, plan), kwargs, *_ = body
    if kwargs:
        # The one of the hook.
        return
    strike(place, GUARDED, key, plan, Span(Journal(Path(plan["journal"])), None))


@task_postrun.connect
def _done(args: tuple[Any, ...] | None = None, **_: Any) -> None:
    """The place ``done``: after the result was stored, before the acknowledgement."""
    span: Span | None = vars(_here).pop("span", None)
    if span is not None and not span.ended:
        # Struck where it could not note its end; now nothing strikes any more.
        span.end(LeaseLost.__name__)
    if args and len(args) == 3:
        kind, key, plan = args
        journal = Journal(Path(plan["journal"]))
        strike("done", kind, key, plan, Span(journal, None))


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
    """Where the end of a lease is part of the fault."""
    return body(self, kind, key, plan)


@shared_task(**GUARD, lock_ttl=LONG_TTL)
def guarded_long(self: LockedTask, kind: str, key: int, plan: dict[str, Any]) -> int:
    """Where nobody is to wait for the end of a lease."""
    return body(self, kind, key, plan)


@shared_task(bind=True, acks_late=True, reject_on_worker_lost=True)
def plain(self: Task, kind: str, key: int, plan: dict[str, Any]) -> int:
    """Not guarded, with the acknowledgements of ``LockedTask``."""
    return body(self, kind, key, plan)


@shared_task(bind=True)
def early(self: Task, kind: str, key: int, plan: dict[str, Any]) -> int:
    """Not guarded, with Celery's own defaults: acknowledged before it runs."""
    return body(self, kind, key, plan)


@shared_task(bind=True, acks_late=True, reject_on_worker_lost=True)
def follower(self: Task, key: int, plan: dict[str, Any], by: str = FOLLOWER) -> None:
    """Is sent by a body; tells of each of its deliveries."""
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
    """The same with a record of its own, and an effect that must not be doubled."""
    Effect.objects.create(order_number=key, by=RECORDED_FOLLOWER, delivery=self.request.id or "")
    _followed(self, RECORDED_FOLLOWER, key, plan)


def _followed(task: Task, by: str, key: int, plan: dict[str, Any]) -> None:
    # Not a database row: the line must exist as soon as the message does.
    Journal(Path(plan["journal"])).write("followed", by=by, key=key, delivery=task.request.id)
