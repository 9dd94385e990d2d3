"""The pages of idempotency records and of lock events."""

from __future__ import annotations

import datetime as dt

import pytest
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from django_dlock import locks, process
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import IdempotencyRecord, LockEvent

LOCAL = "django_dlock.backends.local.LocalBackend"
RECORDS = "/admin/django_dlock/idempotencyrecord/"
EVENTS = "/admin/django_dlock/lockevent/"

pytestmark = pytest.mark.django_db


class DownBackend(LocalBackend):
    """An alias of which nobody answers."""

    def get(self, name):
        raise BackendUnavailable("nobody answers", name, self.alias)


@pytest.fixture(autouse=True)
def aliases(settings):
    use(settings, LOCAL)
    yield
    locks.reset()


def use(settings, backend):
    settings.DLOCKS = {"default": {"BACKEND": backend}}
    locks.reset()


def make_record(key="42", **facts):
    now = timezone.now()
    values = {
        "scope": "shop.charge",
        "state": "succeeded",
        "attempt": 1,
        "lock_alias": "default",
        "lock_name": f"order:{key}",
        "owner": "owner",
        "created_at": now,
        "started_at": now,
        "expires_at": now + dt.timedelta(days=7),
        **facts,
    }
    digest = IdempotencyRecord.digest_of(values["scope"], key)
    return IdempotencyRecord.objects.create(key=key, digest=digest, **values)


def run_under_way(**facts):
    """A record whose owner holds its lock."""
    record = make_record(state="running", **facts)
    backend = locks["default"]
    request = LeaseRequest(name=record.lock_name, owner=record.owner, ttl=30)
    assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)
    return record


def visitor(*permissions):
    user = User.objects.create_user("visitor", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    client.user = user
    return client


@pytest.fixture
def operator():
    return visitor("view_idempotencyrecord", "forget_idempotencyrecord")


def page_of(record, step="change"):
    return f"{RECORDS}{record.pk}/{step}/"


def forget(client, record, *, force=False, **seen):
    answers = {"attempt": record.attempt, "state": record.state, **seen}
    if force:
        answers["force"] = "on"
    return client.post(page_of(record, "forget"), answers, follow=True)


def messages_on(response):
    return [str(message) for message in response.context["messages"]]


def keys_on(response):
    return [record.key for record in response.context["cl"].result_list]


# -- idempotency records ------------------------------------------------------------------


def test_records_can_be_searched_and_filtered(admin_client):
    make_record("1")
    make_record("2", state="failed", scope="shop.refund", task_id="t-2")
    for query, keys in (
        ("", ["2", "1"]),
        ("?q=order:1", ["1"]),
        ("?q=t-2", ["2"]),
        ("?state__exact=failed", ["2"]),
        ("?scope=shop.charge", ["1"]),
        ("?expires_at__gte=2100-01-01+00:00:00%2B00:00", []),
    ):
        assert keys_on(admin_client.get(RECORDS + query)) == keys, query


def test_a_record_is_read_only(admin_client):
    record = make_record()
    assert b"order:42" in admin_client.get(page_of(record)).content
    assert admin_client.post(page_of(record), {"state": "failed"}).status_code == 403
    assert admin_client.get(RECORDS + "add/").status_code == 403
    assert admin_client.post(page_of(record, "delete"), {"post": "yes"}).status_code == 403
    assert IdempotencyRecord.objects.get().state == "succeeded"


def test_looking_at_the_confirmation_forgets_nothing(operator):
    record = make_record()
    page = operator.get(page_of(record, "forget") + "?attempt=1&state=succeeded&force=on")
    assert page.status_code == 200
    assert IdempotencyRecord.objects.exists()


def test_a_finished_record_is_forgotten_and_that_is_written_down(operator):
    record = make_record()
    response = forget(operator, record)
    assert messages_on(response) == [
        "“shop.charge: 42” was forgotten: its next delivery runs as the first."
    ]
    assert not IdempotencyRecord.objects.exists()
    entry = LogEntry.objects.get()
    assert (entry.user, entry.action_flag) == (operator.user, DELETION)
    assert entry.object_repr == "shop.charge: 42"
    assert entry.change_message == "Forgotten in state succeeded at attempt 1."


def test_a_run_under_way_is_forgotten_only_by_force(operator):
    record = run_under_way()
    assert "under way" in operator.get(page_of(record, "forget")).content.decode()
    refused = forget(operator, record)
    assert "Tick this" in refused.content.decode()
    assert IdempotencyRecord.objects.exists()
    assert not LogEntry.objects.exists()
    forget(operator, record, force=True)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_whose_process_is_dead_needs_no_force(operator):
    record = run_under_way()
    backend = locks["default"]
    backend.goodbye(process.current().id, deadline=backend.call_deadline())
    forget(operator, record)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_whose_lock_has_another_owner_needs_no_force(operator):
    record = run_under_way()
    IdempotencyRecord.objects.update(owner="an older one")
    record.refresh_from_db()
    forget(operator, record)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_of_which_nothing_can_be_told_needs_force(operator, settings):
    use(settings, f"{__name__}.DownBackend")
    record = make_record(state="running")
    page = operator.get(page_of(record, "forget"))
    assert page.status_code == 200
    assert "nobody answers" in page.content.decode()
    forget(operator, record)
    assert IdempotencyRecord.objects.exists()
    forget(operator, record, force=True)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_under_an_alias_that_is_gone_from_the_settings_needs_force(operator):
    record = make_record(state="running", lock_alias="gone")
    forget(operator, record)
    assert IdempotencyRecord.objects.exists()


@pytest.mark.parametrize("seen", [{"attempt": 1}, {"state": "running"}])
def test_a_record_that_has_changed_since_the_look_is_kept(operator, seen):
    """The run ended, or another began, between the page and the click."""
    record = make_record(attempt=2)
    response = forget(operator, record, force=True, **seen)
    assert messages_on(response) == [
        "“shop.charge: 42” has changed since you looked. Nothing was done."
    ]
    assert IdempotencyRecord.objects.exists()
    assert not LogEntry.objects.exists()


def test_a_record_that_is_gone_leads_to_the_list(operator):
    record = make_record()
    record_page = page_of(record, "forget")
    record.delete()
    assert messages_on(operator.get(record_page, follow=True)) == ["There is no such record."]


def test_forgetting_needs_the_csrf_token(operator):
    record = make_record()
    client = Client(enforce_csrf_checks=True)
    client.force_login(operator.user)
    assert forget(client, record).status_code == 403
    assert IdempotencyRecord.objects.exists()


@pytest.mark.parametrize(
    ("permissions", "statuses", "forgotten"),
    [
        ((), [403, 403, 403, 403], False),
        (("view_idempotencyrecord",), [200, 200, 403, 403], False),
        (("forget_idempotencyrecord",), [403, 403, 403, 403], False),
        (("view_idempotencyrecord", "forget_idempotencyrecord"), [200, 200, 200, 200], True),
    ],
)
def test_each_permission_opens_what_it_names(permissions, statuses, forgotten):
    client, record = visitor(*permissions), make_record()
    answers = [
        client.get(RECORDS),
        client.get(page_of(record)),
        client.get(page_of(record, "forget")),
        forget(client, record),
    ]
    assert [answer.status_code for answer in answers] == statuses
    assert IdempotencyRecord.objects.exists() is not forgotten
    if answers[1].status_code == 200:
        assert (b"/forget/" in answers[1].content) is forgotten


def test_an_anonymous_visitor_is_sent_to_the_login(client):
    record = make_record()
    for url in (RECORDS, page_of(record), page_of(record, "forget"), EVENTS):
        assert client.get(url)["Location"].startswith("/admin/login/")
    client.post(page_of(record, "forget"), {"attempt": 1, "state": "succeeded"})
    assert IdempotencyRecord.objects.exists()


# -- lock events --------------------------------------------------------------------------


def make_event(name="order:1", **facts):
    values = {"event": "lost", "alias": "default", "when": timezone.now(), **facts}
    return LockEvent.objects.create(name=name, **values)


def test_events_can_be_searched_and_filtered(admin_client):
    make_event("order:1", reason="expired", detail={"held_for": 90.5, "task_name": "shop.charge"})
    make_event("order:2", event="broken", reason="operator", user="grace")
    page = admin_client.get(EVENTS).content.decode()
    for text in ("held 1m 30s", "shop.charge", "expired", "grace"):
        assert text in page
    for query, names in (
        ("?event__exact=broken", ["order:2"]),
        ("?q=expired", ["order:1"]),
        ("?q=order:", ["order:2", "order:1"]),
    ):
        rows = admin_client.get(EVENTS + query).context["cl"].result_list
        assert [event.name for event in rows] == names


def test_an_event_is_read_only(admin_client):
    event = make_event()
    page = f"{EVENTS}{event.pk}/change/"
    assert admin_client.get(page).status_code == 200
    assert admin_client.post(page, {"name": "x"}).status_code == 403
    assert admin_client.get(EVENTS + "add/").status_code == 403
    assert admin_client.post(f"{EVENTS}{event.pk}/delete/", {"post": "yes"}).status_code == 403
    assert LockEvent.objects.get().name == "order:1"


def test_the_operator_behind_an_event_is_shown_only_to_those_who_may_see_users():
    event = make_event(event="broken", user="grace")
    client = visitor("view_lockevent")
    for url in (EVENTS, f"{EVENTS}{event.pk}/change/"):
        assert b"grace" not in client.get(url).content
    client.user.user_permissions.add(Permission.objects.get(codename="view_user"))
    for url in (EVENTS, f"{EVENTS}{event.pk}/change/"):
        assert b"grace" in client.get(url).content


def test_who_may_not_see_users_cannot_find_them_by_a_query_string_either():
    make_event(user="grace")
    client = visitor("view_lockevent")
    query = f"{EVENTS}?user__startswith=gr"
    assert client.get(query).status_code == 400
    client.user.user_permissions.add(Permission.objects.get(codename="view_user"))
    assert len(client.get(query).context["cl"].result_list) == 1


def test_staff_without_permission_see_no_events():
    assert visitor().get(EVENTS).status_code == 403
