"""Without ``USE_TZ``, Django stores and shows times without a zone: those of ``TIME_ZONE``."""

from __future__ import annotations

import datetime as dt
from io import StringIO
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.core.management import call_command
from django.db import connections
from django.test import override_settings
from django.urls import reverse
from django.utils import timezone

from django_dlock.databases.time import Now, local_time
from django_dlock.models import HeldLock, IdempotencyRecord, LockEvent, LockStatistics
from tests.support.aliases import configured
from tests.support.databases import ALL
from tests.support.posed import pose_events, pose_locks, pose_records

MINUTE = dt.timedelta(minutes=1)
ZONE = "Pacific/Kiritimati"
"""No other zone is further from UTC: 14 hours."""
COMMANDS = (
    ["list_locks"],
    ["list_locks", "--format", "json"],
    ["diagnose_locks"],
    ["clear_stale_locks", "--dry-run"],
    ["purge_idempotency_records"],
    ["purge_lock_events", "--older-than", "0.02"],
    ["purge_fences", "--older-than", "30"],
    ["publish_pending_followups", "--older-than", "60"],
)


@pytest.fixture(params=[False, True], ids=["naive", "aware"])
def zone(request):
    """``TIME_ZONE`` far from UTC, with and without ``USE_TZ``."""
    with override_settings(USE_TZ=request.param, TIME_ZONE=ZONE):
        yield ZoneInfo(ZONE)


@pytest.fixture
def site(db):
    posed = {"default": {"BACKEND": "tests.support.posed.PictureBackend"}}
    with configured(posed, USE_TZ=False, TIME_ZONE=ZONE):
        pose_locks()
        pose_records()
        pose_events()
        yield


def pages():
    """The address of each page of our admin."""
    for model, its_admin in admin.site._registry.items():
        if model._meta.app_label != "django_dlock":
            continue
        keys = ["default/stock:7"] if model is HeldLock else [row.pk for row in model.objects.all()]
        assert keys or model is LockStatistics
        for pattern in filter(lambda pattern: pattern.name, its_admin.get_urls()):
            name, is_of_one = f"admin:{pattern.name}", "object_id" in str(pattern.pattern)
            yield from (reverse(name, args=[quote(key)]) for key in keys if is_of_one)
            yield from () if is_of_one else [reverse(name)]


def test_each_page_of_the_admin_opens(site, admin_client):
    codes = {page: admin_client.get(page, follow=True).status_code for page in pages()}
    # Adding and deleting are refused.
    wrong = {
        page: code
        for page, code in codes.items()
        if code != 200 and not (code == 403 and page.endswith(("/add/", "/delete/")))
    }
    assert not wrong
    assert len(codes) > 40


@pytest.mark.parametrize("step", ["forget", "rerun"])
def test_a_record_is_forgotten_or_run_again(site, admin_client, step):
    record = IdempotencyRecord.objects.get(key="7")
    address = reverse(f"admin:django_dlock_idempotencyrecord_{step}", args=[record.pk])
    facts = {"attempt": record.attempt, "state": record.state, "owner": record.owner, "force": "on"}
    answer = admin_client.post(address, facts, follow=True)
    assert answer.status_code == 200
    assert not IdempotencyRecord.objects.filter(key="7")


def test_each_command_works(site):
    for command in COMMANDS:
        call_command(*command, stdout=StringIO(), stderr=StringIO())
    # Of half an hour.
    assert LockEvent.objects.count() == 2
    assert IdempotencyRecord.objects.count() == 7


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("database", ALL, indirect=True)
def test_the_databases_clock_tells_the_same_time_as_django(zone, database):
    connection = connections[database]
    events = LockEvent.objects.using(database)
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            # The server may be in another zone than the project.
            cursor.execute("SET time_zone = '-05:00'")
    try:
        event = events.create(event="lost", when=timezone.now())
        # Records, follow-ups and fences are written so.
        assert events.filter(pk=event.pk).update(when=Now()) == 1
        written = events.get(pk=event.pk).when
        assert abs(written - timezone.now()) < MINUTE
        assert timezone.is_aware(written) is settings.USE_TZ
        assert events.filter(pk=event.pk, when__gt=Now() - MINUTE, when__lt=Now() + MINUTE)
        assert f"{dt.datetime.now(zone):%Y-%m-%d %H:}" == f"{local_time(written):%Y-%m-%d %H:}"
    finally:
        events.all().delete()
        connection.close()
