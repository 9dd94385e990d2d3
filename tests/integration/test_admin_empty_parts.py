"""The pages of the admin leave out what would only say that there is nothing."""

from __future__ import annotations

import datetime as dt
import re
from html import unescape

import pytest
from django.urls import reverse
from django.utils import timezone

from django_dlock.models import FollowUp, IdempotencyRecord, LockEvent
from tests.integration.test_admin_held_locks import aliases, hold, page_of, visitor
from tests.integration.test_admin_why import queue_up

__all__ = ["aliases"]

pytestmark = pytest.mark.django_db


def text_of(html):
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def labels_of(response):
    """The rows of the page of one object; none of them is empty."""
    page = response.content.decode()
    row = r'<label>([^<]*):</label>\s*<div class="readonly">(.*?)</div>'
    rows = re.findall(row, page, re.DOTALL)
    assert rows
    for label, value in rows:
        assert text_of(value) not in {"", "-", "None", "{}"}, label
    return {label for label, _value in rows}


def page(obj, step="change"):
    return reverse(f"admin:django_dlock_{obj._meta.model_name}_{step}", args=[obj.pk])


@pytest.fixture
def bare():
    """A record of a view that has just begun."""
    now = timezone.now()
    return IdempotencyRecord.objects.create(
        digest=IdempotencyRecord.digest_of("shop.pay", "42"),
        scope="shop.pay",
        key="42",
        state="running",
        attempt=1,
        created_at=now,
        started_at=now,
        expires_at=now + dt.timedelta(days=7),
    )


RARE = {
    *("Worker", "Task id", "Finished at", "Lock", "Result", "Error", "History", "Owner"),
    *("Fencing token", "Step", "Ending", "Payload fingerprint"),
}


def test_a_record_shows_only_what_it_has(admin_client, bare):
    response = admin_client.get(page(bare))
    labels = labels_of(response)
    assert {"Key", "State", "Attempt", "Started at", "Expires at"} <= labels
    assert not RARE & labels
    assert "follow_ups-group" not in response.content.decode()
    confirmation = text_of(admin_client.get(page(bare, "forget")).content.decode())
    assert "Started at" in confirmation
    for label in ("Task id", "Finished at", "Worker"):
        assert label not in confirmation
    FollowUp.objects.create(
        record=bare,
        task="shop.receipt",
        task_id="t-9",
        message="{}",
        created_at=bare.created_at,
        expires_at=bare.expires_at,
    )
    IdempotencyRecord.objects.update(
        worker="w",
        task_id="t-1",
        finished_at=bare.started_at,
        lock_alias="default",
        lock_name="a",
        result='"x"',
        error="ValueError('x')",
        owner="o",
        token=7,
        step=1,
        ending="returned",
        payload="p",
        state="succeeded",
    )
    LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="a")
    full = admin_client.get(page(bare)).content.decode()
    shown = {label.strip() for label in re.findall(r"<label>([^<]*):</label>", full)}
    assert shown >= RARE
    assert "follow_ups-group" in full


def test_an_event_and_an_outbox_message_show_only_what_they_have(bare):
    client = visitor("view_lockevent", "view_followup", "view_user")
    event = LockEvent.objects.create(when=timezone.now(), event="lost", alias="default", name="a")
    assert labels_of(client.get(page(event))) == {"When", "Event", "Alias", "Lock"}
    message = FollowUp.objects.create(
        record=bare,
        task="shop.receipt",
        task_id="t-9",
        message="{}",
        created_at=bare.created_at,
        expires_at=bare.expires_at,
    )
    labels = labels_of(client.get(page(message)))
    assert {"Task", "Task id", "State"} <= labels
    assert not {"Published at", "Error"} & labels


def test_a_release_promises_the_lock_only_to_waiters_that_there_may_be(admin_client):
    hold("a")
    confirmation = page_of("a", step="release")
    assert "The next waiter" not in admin_client.get(confirmation).content.decode()
    queue_up("a")
    assert "The next waiter gets it at once." in admin_client.get(confirmation).content.decode()
