"""Admin sites of a project that have only some of the package's pages."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from django.contrib.admin import AdminSite
from django.test import override_settings
from django.urls import clear_url_caches, path
from django.utils import timezone

from django_dlock import Lock
from django_dlock.admin.events import LockEventAdmin
from django_dlock.admin.held_locks import HeldLockAdmin
from django_dlock.admin.records import IdempotencyRecordAdmin
from django_dlock.admin.statistics import LockStatisticsAdmin
from django_dlock.models import HeldLock, IdempotencyRecord, LockEvent, LockStatistics

PAGES = {
    HeldLock: HeldLockAdmin,
    LockEvent: LockEventAdmin,
    IdempotencyRecord: IdempotencyRecordAdmin,
    LockStatistics: LockStatisticsAdmin,
}

pytestmark = pytest.mark.django_db


@pytest.fixture
def only(admin_client: Any) -> Any:
    from testproject import urls

    made = []

    def make(model: Any) -> Any:
        site = AdminSite(name="ops")
        site.register(model, PAGES[model])
        module = ModuleType("urls_of_ops")
        module.urlpatterns = [*urls.urlpatterns, path("ops/", site.urls)]
        change = override_settings(ROOT_URLCONF=module)
        change.enable()
        clear_url_caches()
        made.append(change)
        return admin_client

    yield make
    for change in made:
        change.disable()
    clear_url_caches()


def event_of(name: str) -> LockEvent:
    return LockEvent.objects.create(event="lost", alias="local", name=name, when=timezone.now())


def record_of_lock(name: str) -> IdempotencyRecord:
    times = dict.fromkeys(("created_at", "started_at", "expires_at"), timezone.now())
    facts = {"lock_alias": "local", "lock_name": name, "state": "running", "attempt": 1}
    return IdempotencyRecord.objects.create(digest="0" * 64, scope="s", key="k", **facts, **times)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "?q=free&alias=local",
        "blocking/",
        "local_2Fheld/change/",
        "local_2Fheld/history/",
        "local_2Fheld/release/",
        "local_2Ffree/change/",
    ],
)
def test_a_site_with_held_locks_only(only: Any, page: str) -> None:
    client = only(HeldLock)
    event_of("held")
    record_of_lock("held")
    with Lock("held", ttl=30, using="local"):
        response = client.get(f"/ops/django_dlock/heldlock/{page}")
    assert response.status_code == 200
    assert "/ops/django_dlock/lock" not in response.content.decode()


@pytest.mark.parametrize("model", [LockEvent, IdempotencyRecord, LockStatistics])
def test_a_site_without_held_locks(only: Any, model: Any) -> None:
    client = only(model)
    row = {LockEvent: event_of, IdempotencyRecord: record_of_lock}.get(model)
    pages = [""] if row is None else ["", f"{row('free').pk}/change/"]
    for page in pages:
        assert client.get(f"/ops/django_dlock/{model._meta.model_name}/{page}").status_code == 200
