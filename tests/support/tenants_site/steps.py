"""What the test does in the project, one step at a time: a line of JSON in, one out."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import django

# django-tenants prints what it does.
ANSWERS, sys.stdout = sys.stdout, sys.stderr

django.setup()

from customers.models import Client, Domain  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.test import Client as Browser  # noqa: E402
from django_tenants.utils import schema_context  # noqa: E402
from shop.celery import app  # noqa: E402
from shop.models import Payment  # noqa: E402
from shop.tasks import charge  # noqa: E402

from django_dlock import Lock, locks  # noqa: E402
from django_dlock.celery.publishing import rerun  # noqa: E402
from django_dlock.models import IdempotencyRecord, LeaseRecord, LockEvent  # noqa: E402

HELD: dict[str, Lock] = {}


def setup() -> None:
    """The shared schema, and two tenants with a schema each."""
    app.set_current()
    call_command("migrate_schemas", shared=True, verbosity=0)
    for name in ("a", "b"):
        tenant = Client.objects.create(schema_name=name)
        Domain.objects.create(domain=f"{name}.localhost", tenant=tenant)


def pay(tenant: str, key: str) -> list[Any]:
    headers = {"host": f"{tenant}.localhost", "idempotency-key": key, "accept": "application/json"}
    response = Browser().post("/pay/1/", headers=headers)
    return [response.status_code, response.content.decode(), "Idempotent-Replayed" in response]


def publish(tenant: str, order: int) -> str:
    with schema_context(tenant):
        return str(charge.delay(order).id)


def result(task_id: str) -> Any:
    return app.AsyncResult(task_id).get(timeout=60)


def payments(tenant: str, order: int) -> int:
    with schema_context(tenant):
        return Payment.objects.filter(order=order).count()


def hold(tenant: str, name: str, using: str = "default") -> None:
    with schema_context(tenant):
        HELD[tenant] = Lock(name, bound=False, using=using)
        assert HELD[tenant].acquire(blocking=False)


def let_go(tenant: str) -> None:
    HELD.pop(tenant).release()


def held() -> list[str]:
    return sorted(info.name for info in locks["default"].list())


def listed(*options: str) -> str:
    text = io.StringIO()
    call_command("list_locks", *options, stdout=text)
    return text.getvalue()


def clear(name: str) -> str:
    text = io.StringIO()
    call_command("clear_stale_locks", name=name, force=True, stdout=text)
    return text.getvalue()


def records(schema: str) -> list[str]:
    with schema_context(schema):
        found = IdempotencyRecord.objects.order_by("scope", "key")
        return [f"{record.scope} {record.key}" for record in found]


def events(schema: str) -> list[str]:
    with schema_context(schema):
        return [f"{event.event} {event.name}" for event in LockEvent.objects.all()]


def leases(schema: str) -> list[str]:
    with schema_context(schema):
        return list(LeaseRecord.objects.values_list("name", flat=True))


def run_again(schema: str, scope: str, key: str) -> str:
    """As an operator does; but the broker is away, so that it is published later."""
    with schema_context(schema):
        row = rerun.forget_and_write(IdempotencyRecord.objects.get(scope=scope, key=key))
        assert row is not None
        return row.task_id


for line in sys.stdin:
    step, *args = json.loads(line)
    print(json.dumps(globals()[step](*args)), file=ANSWERS, flush=True)
