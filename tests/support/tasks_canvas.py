"""Tasks for chains, groups and chords; ``celery -A tests.support.tasks_canvas worker``.

A worker dies once at each point that its test names: ``die-<point>`` is a file in the test's
directory that contains the order.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from celery import chain, group, shared_task
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore
from celery.signals import after_task_publish, before_task_publish

# Imported from there, because Django must be set up first.
from tests.support.tasks_app import LockedTask, app, note, wait_for

__all__ = ["app"]


def may_die(point: str, place: str, order: int) -> None:
    """Kill this process, as the kernel would, if a test wants it here."""
    wanted = Path(place) / f"die-{point}"
    if (
        wanted.exists()
        and int(wanted.read_text()) == order
        and note(place, f"died-{point}", 1) == 1
    ):
        os.kill(os.getpid(), signal.SIGKILL)


class Member(LockedTask):
    """Dies on the way out of ``__call__``, and when all is sent, stored and counted."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        if not self.request.called_directly:
            may_die("recorded", args[1], args[0])
        return result

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        may_die("counted", args[1], args[0])

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        may_die("counted", args[1], args[0])


# Not atomic: a waiting body would block the others on SQLite.
recorded: dict[str, Any] = {
    "base": Member,
    "bind": True,
    "lock_key": "order:{order}",
    "idempotency_key": "{order}",
}


def work(task: LockedTask, order: int, place: str, how: str) -> str:
    """Work once and end as ``how`` says; the result contains order and number of the run."""
    count = note(place, f"began-{order}", task.request.id)
    if how == "fail":
        raise ValueError(f"order {order}")
    if how.startswith("wait") and count == 1:
        wait_for(place, how)
    try:
        if how == "chain":
            task.replace(chain(plain.si(f"{order} not yet"), plain.si(f"{order} replaced")))
        if how == "group":
            task.replace(group(plain.si(f"{order} left"), plain.si(f"{order} right")))
    except Ignore:
        may_die("replaced", place, order)
        raise
    return f"{order} run {count}"


@shared_task(**recorded)
def member(self: LockedTask, order: int, place: str, how: str = "") -> str:
    """With a record."""
    return work(self, order, place, how)


@shared_task(base=Member, bind=True, lock_key="order:{order}")
def unrecorded(self: LockedTask, order: int, place: str, how: str = "") -> str:
    """With the lock alone."""
    return work(self, order, place, how)


@shared_task(**recorded, if_contended="skip")
def skipped(self: LockedTask, order: int, place: str, how: str = "") -> str:
    """Skips work that another task is doing."""
    return work(self, order, place, how)


@shared_task(**{**recorded, "base": LockedTask})
def next_member(self: LockedTask, before: str, order: int, place: str) -> str:
    """Follows another in a chain."""
    return f"{before}, {work(self, order, place, '')}"


@shared_task(bind=True, base=LockedTask, lock_key="item")
def item(self: LockedTask, number: int, place: str) -> int:
    """All items of all chunks exclude each other."""
    assert note(place, "inside", number) == 1, "another item was running"
    if number < 0:
        raise ValueError(number)
    (Path(place) / "inside").unlink()
    note(place, "items", self.request.id)
    return number * 10


@shared_task(**{**recorded, "base": LockedTask}, if_duplicate="fail")
def item_once(self: LockedTask, order: int, place: str) -> str:
    """An item with a record, for which a duplicate is an error."""
    return work(self, order, place, "")


@shared_task
def plain(result: object) -> object:
    """A plain Celery task."""
    return result


@shared_task(bind=True)
def gather(self: Any, results: object, place: str, order: int) -> object:
    """The body of a chord, the end of a chain, or a callback."""
    note(place, f"gathered-{order}", f"{self.request.id} {results}")
    return results


@shared_task(bind=True)
def failed(self: Any, failed_id: str, place: str, order: int) -> None:
    """An errback; Celery sends those that are bound, and calls the others directly."""
    note(place, f"failed-{order}", f"{self.request.id} {failed_id}")


def _place_of(body: Any) -> tuple[str, int]:
    args = body[0]
    return args[-2], args[-1]


@before_task_publish.connect(sender=gather.name)
def about_to_send(body: Any, **_: Any) -> None:
    may_die("sending", *_place_of(body))


@after_task_publish.connect(sender=gather.name)
def has_sent(body: Any, **_: Any) -> None:
    may_die("sent", *_place_of(body))


_count = RedisBackend.on_chord_part_return


def _about_to_count(self: RedisBackend, request: Any, *args: Any, **kwargs: Any) -> Any:
    if request.task in (member.name, unrecorded.name):
        may_die("stored", request.args[1], request.args[0])
    return _count(self, request, *args, **kwargs)


RedisBackend.on_chord_part_return = _about_to_count
