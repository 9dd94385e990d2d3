"""The lists of records and messages: what their columns say, and how they sort."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.contrib import admin
from django.test import RequestFactory
from django.utils import timezone

from django_dlock.admin.records import IdempotencyRecordAdmin
from django_dlock.models import FollowUp, IdempotencyRecord

pytestmark = pytest.mark.django_db

RECORDS, MESSAGES = (f"/admin/django_dlock/{m}/" for m in ("idempotencyrecord", "followup"))


def make_record(key, attempt=1, deaths=0, took=None):
    started = timezone.now() - dt.timedelta(hours=1)
    return IdempotencyRecord.objects.create(
        digest=IdempotencyRecord.digest_of("shop.charge", key),
        scope="shop.charge",
        key=key,
        state="waiting" if took is None else "succeeded",
        attempt=attempt,
        deaths=deaths,
        owner="o",
        created_at=started,
        started_at=started,
        finished_at=None if took is None else started + dt.timedelta(seconds=took),
        expires_at=started,
    )


def cells(page, column):
    found = re.findall(rf'class="field-{column}">(.*?)</t[dh]>', page.content.decode(), re.DOTALL)
    values = (re.sub(r'<span class="dlock-label">.*?</span>', "", cell) for cell in found)
    return [" ".join(re.sub(r"<.*?>", " ", value).split()) for value in values]


def test_a_row_says_what_is_not_usual_about_its_runs(admin_client):
    for key, attempt, deaths in (("a", 1, 0), ("b", 5, 5), ("c", 2, 0), ("d", 1, 1)):
        make_record(key, attempt, deaths)
    page = admin_client.get(RECORDS + "?o=0")
    assert cells(page, "runs") == ["-", "5 attempts 5 deaths", "2 attempts", "1 attempt 1 death"]


def test_records_are_sorted_by_their_runs_and_start(admin_client):
    for key, attempt in (("a", 2), ("b", 3), ("c", 1)):
        make_record(key, attempt)
    assert cells(admin_client.get(RECORDS + "?o=3"), "key") == ["c", "a", "b"]
    assert cells(admin_client.get(RECORDS + "?o=-4"), "key") == ["c", "b", "a"]


def test_a_row_says_how_long_the_run_took(admin_client):
    make_record("a", took=64)
    assert cells(admin_client.get(RECORDS), "started_and_took")[0].endswith("took 1m 4s")


def test_messages_are_sorted_by_when_they_were_published(admin_client):
    record, now = make_record("a"), timezone.now()
    for task, minutes in (("late", 1), ("early", 9)):
        FollowUp.objects.create(
            record=record,
            task=task,
            task_id="t",
            message="{}",
            created_at=now,
            expires_at=now,
            published_at=now - dt.timedelta(minutes=minutes),
        )
    for order, tasks in (("2", ["early", "late"]), ("-2", ["late", "early"])):
        page = admin_client.get(f"{MESSAGES}?published=yes&o={order}")
        assert cells(page, "task_wrapped") == tasks


def test_a_project_can_list_columns_of_its_own(admin_user):
    class Own(IdempotencyRecordAdmin):
        list_display = ("key", "attempt", "finished", "is_new", "task_id", "lock_name")

        @admin.display(boolean=True)
        def is_new(self, record):
            return record.attempt == 1

    request = RequestFactory().get(RECORDS)
    request.user = admin_user
    make_record("a", attempt=3)
    page = Own(IdempotencyRecord, admin.site).changelist_view(request).render()
    assert cells(page, "attempt") == ["3"]
    assert cells(page, "finished") == ["-"]
    assert 'alt="False"' in page.content.decode()
