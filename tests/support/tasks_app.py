"""Tasks that the tests' workers run; ``celery -A tests.support.tasks_app worker``.

A body reports and waits with files, because its database writes may not be committed yet:
``began``, ``wrote``, ``ended`` and ``before_<n>`` are lines and files in its test's directory.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from celery import Celery, Task, shared_task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.tasks_settings")

app = Celery("tests")
app.config_from_object("django.conf:settings", namespace="CELERY")

from django.apps import apps  # noqa: E402

if not apps.ready:
    import django

    django.setup()

from django.db import connection, connections  # noqa: E402

from django_dlock import Lock, LockedTask  # noqa: E402
from testproject.shop.models import Effect  # noqa: E402
from tests.support.workers import OVER  # noqa: E402


def note(place: str, what: str, text: object) -> int:
    """Append a line, atomically between processes; return the number of lines."""
    path = Path(place) / what
    with path.open("a") as file:
        file.write(f"{text}\n")
    return len(path.read_text().splitlines())


def wait_for(place: str, what: str) -> None:
    """Wait until the test creates the file, in short sleeps so that it can be interrupted."""
    path, over = Path(place) / what, Path(place) / OVER
    while not path.exists():
        if over.exists():
            raise RuntimeError(f"The test has ended without {what!r}")
        time.sleep(0.01)


def body(task: Task, order: int, place: str, *, gate: str = "") -> int:
    """Make one effect; return how often this body has begun for the order."""
    count = note(place, f"began-{order}", f"{task.request.id} {os.getpid()}")
    Effect.objects.create(order_number=order, by=task.name, delivery=task.request.id or "")
    note(place, f"wrote-{order}", task.request.id)
    if gate and count == 1:
        wait_for(place, gate)
    note(place, f"ended-{order}", task.request.id)
    return count


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}")
def locked(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """The lock alone."""
    return body(self, order, place, gate=gate)


@shared_task(
    base=LockedTask, bind=True, lock_key="order:{order}", idempotency_key="{order}", atomic=True
)
def charge(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """Lock and record in one transaction; the first run waits for ``gate``."""
    return body(self, order, place, gate=gate)


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}", max_attempts=1)
def locked_once(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """As ``locked``; a single loss that counts would make it fail for good."""
    return body(self, order, place, gate=gate)


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    idempotency_key="{order}",
    atomic=True,
    max_attempts=1,
)
def charge_once(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """As ``charge``; a single loss that counts would make it fail for good."""
    return body(self, order, place, gate=gate)


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    idempotency_key="{order}",
    atomic=True,
    if_lost="finish",
)
def stubborn(self: LockedTask, order: int, place: str, gate: str = "") -> int:
    """Continues after a loss; only its attempt number decides whether it counts."""
    return body(self, order, place, gate=gate)


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    idempotency_key="{order}",
    atomic=True,
    max_attempts=2,
)
def killed(self: LockedTask, order: int, place: str) -> None:
    """Dies in the middle, every time."""
    body(self, order, place)
    os.kill(os.getpid(), 9)


@shared_task(
    base=LockedTask, bind=True, lock_key="order:{order}", idempotency_key="{order}", atomic=True
)
def ends(self: LockedTask, order: int, place: str, how: str) -> object:
    """Ends its first run as the test says, after its effect; its second run returns."""
    count = body(self, order, place)
    if count > 1:
        return count
    if how == "retry":
        raise self.retry(countdown=0, exc=RuntimeError("again"))
    if how == "swallowed":
        # Publish once as a retry does, so that it is connected and the queue is declared.
        tells.apply_async((1_000_000 + order, place), queue="prefork", retries=1)
        note(place, f"connected-{order}", order)
        wait_for(place, "go")
        raise self.retry(countdown=0)
    if how == "ignore":
        raise Ignore
    if how == "reject":
        raise Reject("not now", requeue=True)
    if how == "raise":
        raise RuntimeError("no")
    if how == "soft limit":
        raise SoftTimeLimitExceeded
    if how == "unserialisable":
        return object()
    raise AssertionError(how)


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    idempotency_key="{order}",
    atomic=True,
    soft_time_limit=1,
)
def limited(self: LockedTask, order: int, place: str) -> int:
    """Meets its soft time limit while it waits forever."""
    return body(self, order, place, gate="never")


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    autoretry_for=(ValueError,),
    retry_kwargs={"max_retries": 2, "countdown": 0},
)
def retries(self: LockedTask, order: int, place: str) -> int:
    """Fails once, and is retried by Celery itself."""
    if note(place, f"tried-{order}", self.request.retries) == 1:
        raise ValueError("once")
    return self.request.retries


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    idempotency_key="{order}",
    atomic=True,
    max_attempts=2,
)
def late(self: LockedTask, order: int, place: str, gate: str) -> int:
    """Writes after waiting, or never, because it breaks the connection."""
    count = note(place, f"began-{order}", self.request.id)
    if gate == "broken":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    elif count == 1:
        wait_for(place, gate)
    Effect.objects.create(order_number=order, by=self.name)
    return count


@shared_task(
    base=LockedTask,
    bind=True,
    lock_key="order:{order}",
    idempotency_key="{order}",
    atomic=True,
    max_attempts=2,
)
def loses_connection(self: LockedTask, order: int, place: str, how: str) -> None:
    """Returns as if nothing had happened, every time."""
    note(place, f"began-{order}", self.request.id)
    Effect.objects.create(order_number=order, by=self.name)
    if how == "closed":
        connections.close_all()
        return
    session = {"postgresql": "pg_backend_pid()", "mysql": "CONNECTION_ID()"}[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {session}")
        count = note(place, f"session-{order}", cursor.fetchone()[0])
    wait_for(place, f"ended-{order}-{count}")


@shared_task(base=LockedTask, bind=True, lock_key="order:{order}")
def tells(self: LockedTask, order: int, place: str) -> int:
    """Notes the properties of its own message."""
    request = self.request
    told = {
        "id": request.id,
        "correlation_id": request.correlation_id,
        "priority": request.delivery_info["priority"],
        "retries": request.retries,
        "root": request.root_id,
        "parent": request.parent_id,
        "mine": request.headers.get("mine"),
        "expires": request.expires,
        "limits": request.timelimit,
    }
    note(place, f"told-{order}", json.dumps(told))
    return order


@shared_task
def leaves(name: str) -> None:
    """Ends without releasing an unbound lock, which the end of its thread does not end."""
    assert Lock(name, ttl=60, bound=False).acquire()


@shared_task
def collect(results: object, place: str, order: int) -> object:
    """The end of a chain, the body of a chord, or a callback."""
    note(place, f"collected-{order}", results)
    return results
