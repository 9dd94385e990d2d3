"""Locks, records and events as on a busy site, to be shown on the pages."""

from __future__ import annotations

import dataclasses
import datetime as dt
from hashlib import sha256
from uuid import UUID

from django.utils import timezone

from django_dlock import locks, process
from django_dlock.backends import local
from django_dlock.lease import HOLDING, OWNER_PART, Lease, LeaseRequest, Waiter
from django_dlock.models import FollowUp, IdempotencyRecord, LockEvent
from testproject.shop.models import Order


def owner_of(name):
    return sha256(name.encode()).hexdigest()[:32]


class PictureBackend(local.LocalBackend):
    """Pretends to have locks of several hosts, some of them hours old."""

    def pose(self, name, host, pid, *, age, silent_for=0.0, renewals=0, waiting=0, **facts):
        """A lock that ``host`` has held for ``age`` seconds."""
        me = process.current()
        # Of another boot, so that nothing can be proven about it here.
        holder = me._replace(id=f"{host}-{pid}", host=host, pid=pid, boot_id="x", machine_id="")
        request = LeaseRequest(name=name, owner=owner_of(name), ttl=30.0, **facts)
        lease = self.acquire(request, deadline=self.call_deadline())
        assert isinstance(lease, Lease)
        entry = self._entries[name]
        entry.process, entry.renewals = holder, renewals
        entry.at -= age
        entry.wall_at -= age
        # The token is the time of the grant in microseconds, and the list is ordered by it.
        entry.token -= int(age * 1e6)
        entry.until -= age % 9
        for number in range(waiting):
            self.pose_waiter(name, "worker-4", 300 + number, waited=age / (number + 2))
        entry.silent_for = silent_for
        return lease

    def pose_waiter(self, name, host, pid, *, waited, holds=(), state="alive", **metadata):
        """A waiter that has waited for ``waited`` seconds, and holds these locks."""
        if holds:
            metadata[HOLDING] = " ".join(owner_of(held)[:OWNER_PART] for held in holds)
        process_ = process.current()._replace(id=f"{host}-{pid}", host=host, pid=pid, boot_id="x")
        moment = timezone.now() - dt.timedelta(seconds=waited)
        waiter = Waiter(
            name, self.alias, f"{host} {pid}", moment, waited, process_, state, metadata
        )
        self._posed = getattr(self, "_posed", {})
        self._posed.setdefault(name, []).append(waiter)
        self._waiters[name, waiter.owner] = (0.0, "{}")

    def waiters(self, name, *, limit=100):
        found = getattr(self, "_posed", {}).get(name, [])
        return sorted(found, key=lambda waiter: waiter.since)[:limit]

    def _info(self, name, entry, now):
        info = super()._info(name, entry, now)
        silent_for = getattr(entry, "silent_for", 0.0)
        if silent_for and info.holder_state == "alive":
            info = dataclasses.replace(info, holder_state="silent", silent_for=silent_for)
        return info


def pose_locks():
    backend = locks["default"]
    task = '{"task_name": "shop.tasks.%s", "task_id": "%s"}'
    backend.pose(
        "import:1207",
        "worker-1",
        218,
        age=4210,
        renewals=421,
        metadata=task % ("import_account", "5ff2f3b6-45ae-0f12-88e6-eb5885056737"),
    )
    backend.pose(
        "report:daily",
        "worker-2",
        94,
        age=760,
        silent_for=48,
        renewals=71,
        metadata=task % ("daily_report", "5f9c2d43-cfc1-2b43-7120-f31496d8533a"),
    )
    backend.pose(
        "invoice:2281",
        "worker-1",
        221,
        age=12.4,
        renewals=1,
        waiting=2,
        metadata=task % ("send_invoice", "482b268e-bdc0-a472-e956-d8674f884326"),
    )
    backend.pose(
        "order:5519",
        "worker-3",
        57,
        age=8.1,
        kind="parked",
        metadata=task % ("charge", "a7ef4cc7-517f-f0d5-2244-7f9de6823443"),
    )
    backend.pose(
        "checkout:81", "web-1", 33, age=1.2, metadata='{"path": "/checkout/", "user": "81"}'
    )
    backend.pose(
        "stock:7",
        "worker-2",
        91,
        age=66,
        renewals=6,
        metadata=task % ("reprice", "6ae7e778-2443-e309-2dc3-aceaaef8c597"),
    )
    pose_waiters(backend)
    backend.deregister("worker-2-91", deadline=backend.call_deadline())


def pose_waiters(backend):
    """Chains, a deadlock, and waiters that are gone or silent."""
    backend.pose_waiter(
        "import:1207",
        "worker-2",
        94,
        waited=722,
        holds=["report:daily"],
        task_name="shop.tasks.daily_report",
        task_id="5f9c2d43-cfc1-2b43-7120-f31496d8533a",
    )
    backend.pose_waiter("import:1207", "web-1", 35, waited=4.2, path="/accounts/1207/", user="81")
    backend.pose_waiter(
        "report:daily", "worker-3", 57, waited=300, task_name="shop.tasks.send_report"
    )
    backend.pose_waiter("report:daily", "worker-3", 58, waited=120, state="silent")
    backend.pose_waiter(
        "checkout:81",
        "worker-1",
        221,
        waited=0.9,
        holds=["invoice:2281"],
        task_name="shop.tasks.send_invoice",
        task_id="482b268e-bdc0-a472-e956-d8674f884326",
    )
    backend.pose_waiter(
        "invoice:2281", "web-1", 33, waited=1.0, holds=["checkout:81"], path="/checkout/", user="81"
    )
    backend.pose_waiter("stock:7", "worker-3", 59, waited=40, task_name="shop.tasks.reprice")
    backend.pose_waiter("stock:7", "web-2", 40, waited=31.0, state="dead", path="/stock/7/")


MESSAGE = (
    '{"task": "%s", "args": [%s], "kwargs": {"notify": "customer@example.com", "copies": 2}, '
    '"options": {"exchange": "", "routing_key": "celery"}}'
)
RESULT = '{"charged": "129.90", "currency": "EUR", "receipts": ["R-20871", "R-20872"]}'
ERROR = (
    "AttemptsExhausted(\"Key '2280' in scope 'shop.tasks.send_invoice' had 5 runs that died in the "
    "middle; the last one: WorkerLostError('Worker exited prematurely: signal 9 (SIGKILL)')\")"
)


def pose_records():
    now = timezone.now()
    for number, (scope, key, state, attempt, deaths) in enumerate(
        [
            ("shop.tasks.charge", "5519", "waiting", 2, 0),
            ("shop.tasks.charge", "5518", "succeeded", 1, 0),
            ("shop.tasks.charge", "5517", "succeeded", 3, 2),
            ("shop.tasks.send_invoice", "2281", "running", 1, 0),
            ("shop.tasks.send_invoice", "2280", "failed", 5, 5),
            ("shop.tasks.refund", "140", "succeeded", 1, 0),
            # Its process is gone.
            ("shop.tasks.reprice", "7", "running", 1, 0),
        ]
    ):
        lock = {"2281": "invoice:2281", "7": "stock:7"}.get(key, "")
        started = now - dt.timedelta(minutes=3 * number + 1)
        ended = state in ("succeeded", "failed")
        record = IdempotencyRecord.objects.create(
            digest=IdempotencyRecord.digest_of(scope, key),
            scope=scope,
            key=key,
            state=state,
            attempt=attempt,
            deaths=deaths,
            owner=owner_of(lock) if lock else f"{number:032x}",
            lock_alias="default",
            lock_name=lock or f"{scope}:{key}",
            task_id=str(UUID(int=number << 120 | 0x4E0C1F6E32D4)),
            created_at=started,
            started_at=started,
            finished_at=started + dt.timedelta(seconds=4) if ended else None,
            worker=f"celery@worker-{1 + number % 3} · {218 + number}",
            message=MESSAGE % (scope, key),
            result=RESULT if state == "succeeded" else "",
            error=ERROR if state == "failed" else "",
            expires_at=started + dt.timedelta(days=7),
        )
        if state == "succeeded":
            pose_follow_up(record, "send_receipt", started + dt.timedelta(seconds=4))
            pose_follow_up(record, "update_stock", None, "Error 111 connecting to 127.0.0.1:5672.")


def pose_follow_up(record, task, published_at, error=""):
    FollowUp.objects.create(
        record=record,
        task=f"shop.tasks.{task}",
        task_id=str(UUID(int=record.pk << 120 | len(task))),
        message="{}",
        error=error,
        created_at=record.started_at,
        published_at=published_at,
        expires_at=record.expires_at,
    )


def pose_events():
    now = timezone.now()
    for number, (event, name, reason, held_for, task) in enumerate(
        [
            ("broken", "stock:7", "operator", 66.0, "reprice"),
            ("lost", "import:1206", "expired", 31.4, "import_account"),
            ("taken_over", "invoice:2279", "holder_dead", None, "send_invoice"),
            ("max_hold", "report:weekly", "max_hold", 86400.0, "weekly_report"),
            ("lost", "order:5482", "broken", 12.0, "charge"),
        ]
    ):
        LockEvent.objects.create(
            when=now - dt.timedelta(minutes=17 * number),
            event=event,
            alias="default",
            name=name,
            reason=reason,
            token=1790000000000000 + 7919 * number,
            user="operator" if event == "broken" else "",
            detail={"held_for": held_for, "task_name": f"shop.tasks.{task}"},
        )
    LockEvent.objects.create(
        when=now - dt.timedelta(hours=1),
        event="lost",
        alias="default",
        name="shop.tasks.send_invoice:2280",
        reason="holder_dead",
        detail={"task_name": "shop.tasks.send_invoice"},
    )


def pose_orders():
    Order.objects.create(number=5519)
    Order.objects.create(number=1)
