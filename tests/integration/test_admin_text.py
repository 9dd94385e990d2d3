"""Text from outside stands on every page of the admin without characters that are not visible."""

from __future__ import annotations

import datetime as dt
import json
import re
from urllib.parse import quote as percent_encoded

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.db import models
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dlock import locks
from django_dlock.lease import LeaseRequest
from django_dlock.models import FollowUp, HeldLock, IdempotencyRecord, LockEvent
from tests.unit.test_printable import CONTROLS, DIRECTIONS, SEPARATORS, WITHOUT_WIDTH

pytestmark = pytest.mark.django_db

# A database takes neither the null character nor lone surrogates.
HARMFUL = (CONTROLS + DIRECTIONS + SEPARATORS + WITHOUT_WIDTH).replace("\0", "")
NAME = f"order{DIRECTIONS}{SEPARATORS}{WITHOUT_WIDTH}<b>"
"""Other names are refused."""


@pytest.fixture(autouse=True)
def aliases(settings):
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    locks.reset()
    yield
    locks.reset()


def evil(name: str) -> str:
    return f"{name}<b>{HARMFUL}"


def texts_of(model: type[models.Model]) -> dict[str, str]:
    """A harmful value for each column of text."""
    return {
        field.name: evil(field.name)
        for field in model._meta.concrete_fields
        if isinstance(field, models.CharField | models.TextField) and not field.choices
    }


@pytest.fixture
def objects():
    now = timezone.now()
    times = {"created_at": now, "expires_at": now + dt.timedelta(days=1)}
    message = json.dumps({"args": [evil("argument")], "kwargs": {}}, ensure_ascii=False)
    facts = {
        **texts_of(IdempotencyRecord),
        **times,
        "digest": IdempotencyRecord.digest_of("shop.charge", "42"),
        "message": message,
        "state": "failed",
        "attempt": 1,
        "lock_alias": "default",
        "lock_name": NAME,
        "started_at": now,
    }
    record = IdempotencyRecord.objects.create(**facts)
    follow_up = FollowUp.objects.create(**{**texts_of(FollowUp), **times}, record=record)
    detail = {"host": evil("host"), "pid": 1, "path": evil("path"), evil("key"): evil("value")}
    facts = {**texts_of(LockEvent), "event": "broken", "when": now, "detail": detail}
    event = LockEvent.objects.create(**{**facts, "name": NAME, "alias": "default"})
    metadata = {name: evil(name) for name in ("user", "path", "task", "task_id", "other")}
    request = LeaseRequest(NAME, evil("owner"), 30, metadata=json.dumps(metadata))
    backend = locks["default"]
    assert backend.acquire(request, deadline=backend.call_deadline())
    return {
        HeldLock: f"default/{NAME}",
        IdempotencyRecord: record.pk,
        FollowUp: follow_up.pk,
        LockEvent: event.pk,
    }


@pytest.fixture
def root():
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client


def pages(model, pk):
    prefix = reverse(f"admin:django_dlock_{model._meta.model_name}_changelist")
    yield from (prefix, f"{prefix}?published=all") if model is FollowUp else (prefix,)
    for pattern in admin.site._registry[model].get_urls():
        route = re.sub(r"<\w+:object_id>", percent_encoded(quote(str(pk))), str(pattern.pattern))
        yield prefix + route


def harmful_in(response) -> str:
    # What a form sends back has to be exact, and is not shown.
    text = re.sub(r' value="[^"]*"', "", response.content.decode())
    assert "<b>" not in text
    return "".join(char for char in HARMFUL if char in text and char not in "\n\t")


@pytest.mark.parametrize("model", [HeldLock, IdempotencyRecord, FollowUp, LockEvent])
def test_no_page_shows_what_is_not_visible(objects, root, model):
    shown = 0
    for address in pages(model, objects[model]):
        response = root.get(address, follow=True)
        assert ascii(harmful_in(response)) == "''", address
        shown += response.status_code == 200 and b"\\u202e" in response.content
    assert shown > 2


def test_neither_does_the_log_of_the_admin(objects, root):
    page = reverse("admin:django_dlock_idempotencyrecord_forget", args=[objects[IdempotencyRecord]])
    form = {"attempt": 1, "state": "failed", "owner": evil("owner"), "force": "on"}
    root.post(page, form)
    assert LogEntry.objects.get().object_repr.isprintable()
    assert ascii(harmful_in(root.get(reverse("admin:index")))) == "''"
