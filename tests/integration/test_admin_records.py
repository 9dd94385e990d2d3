"""The pages of idempotency records and of lock events."""

from __future__ import annotations

import datetime as dt
import html
import re
from types import SimpleNamespace

import pytest
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.db.utils import ConnectionHandler
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_dlock import locks, process
from django_dlock.admin import databases, records
from django_dlock.admin.base import BoundedPaginator, may_see_users
from django_dlock.admin.records import IdempotencyRecordAdmin
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import FollowUp, IdempotencyRecord, LockEvent
from django_dlock.operators import audit

LOCAL = "django_dlock.backends.local.LocalBackend"
RECORDS = "/admin/django_dlock/idempotencyrecord/"
EVENTS = "/admin/django_dlock/lockevent/"

pytestmark = pytest.mark.django_db


class DownBackend(LocalBackend):
    """An alias that does not answer."""

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


def make_record(key="42", using="default", **facts):
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
    return IdempotencyRecord.objects.using(using).create(key=key, digest=digest, **values)


def run_under_way(**facts):
    """A record whose owner holds the lock."""
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
    seen = {"owner": record.owner, **seen}
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
    assert b"order:<wbr>42" in admin_client.get(page_of(record)).content
    assert admin_client.post(page_of(record), {"state": "failed"}).status_code == 403
    assert admin_client.get(RECORDS + "add/").status_code == 403
    assert admin_client.post(page_of(record, "delete"), {"post": "yes"}).status_code == 403
    assert IdempotencyRecord.objects.get().state == "succeeded"


def test_opening_the_confirmation_deletes_nothing(operator):
    record = make_record()
    page = operator.get(page_of(record, "forget") + "?attempt=1&state=succeeded&force=on")
    assert page.status_code == 200
    assert IdempotencyRecord.objects.exists()


def test_a_finished_record_is_forgotten_and_that_is_logged(operator):
    record = make_record()
    response = forget(operator, record)
    assert messages_on(response) == [
        "“shop.charge: 42” was forgotten: its next delivery runs like the first one."
    ]
    assert not IdempotencyRecord.objects.exists()
    entry = LogEntry.objects.get()
    assert (entry.user, entry.action_flag) == (operator.user, DELETION)
    assert entry.object_repr == "shop.charge: 42"
    assert entry.change_message == "Forgotten in state succeeded at attempt 1."


def make_follow_up(record, **facts):
    now = timezone.now()
    facts = {"task": "shop.receipt", "task_id": "t", "message": "{}", **facts}
    return FollowUp.objects.create(record=record, created_at=now, expires_at=now, **facts)


def test_a_forgotten_record_takes_its_messages_along_and_becomes_a_lock_event(operator):
    record, other = make_record(), make_record("43")
    kept = make_follow_up(other)
    make_follow_up(record, published_at=timezone.now())
    forget(operator, record)
    assert FollowUp.objects.get() == kept
    event = LockEvent.objects.get()
    assert (event.event, event.name, event.reason) == ("forgotten", "order:42", "operator")
    assert event.user == operator.user.username
    assert (event.detail["scope"], event.detail["key"]) == ("shop.charge", "42")
    assert (event.detail["follow_ups"], event.detail["pending"]) == (1, 0)


def test_a_record_whose_messages_are_pending_is_forgotten_only_by_force(operator):
    record = make_record()
    make_follow_up(record)
    page = operator.get(page_of(record, "forget")).content.decode()
    assert "are not published yet" in page
    assert "Tick this" in forget(operator, record).content.decode()
    assert FollowUp.objects.exists()
    assert IdempotencyRecord.objects.exists()
    assert not LockEvent.objects.exists()
    forget(operator, record, force=True)
    assert not FollowUp.objects.exists()
    assert LockEvent.objects.get().detail["pending"] == 1


def test_a_record_that_is_not_forgotten_becomes_no_lock_event(operator):
    record = make_record()
    forget(operator, record, owner="another")
    assert not LockEvent.objects.exists()


def test_a_record_of_a_current_run_is_forgotten_only_by_force(operator):
    record = run_under_way()
    assert "in progress" in operator.get(page_of(record, "forget")).content.decode()
    refused = forget(operator, record)
    assert "Tick this" in refused.content.decode()
    assert IdempotencyRecord.objects.exists()
    assert not LogEntry.objects.exists()
    forget(operator, record, force=True)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_whose_process_is_dead_needs_no_force(operator):
    record = run_under_way()
    backend = locks["default"]
    backend.deregister(process.current().id, deadline=backend.call_deadline())
    forget(operator, record)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_whose_lock_has_another_owner_needs_no_force(operator):
    record = run_under_way()
    IdempotencyRecord.objects.update(owner="an older one")
    record.refresh_from_db()
    forget(operator, record)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_of_unknown_state_needs_force(operator, settings):
    use(settings, f"{__name__}.DownBackend")
    record = make_record(state="running")
    page = operator.get(page_of(record, "forget"))
    assert page.status_code == 200
    assert "nobody answers" in page.content.decode()
    forget(operator, record)
    assert IdempotencyRecord.objects.exists()
    forget(operator, record, force=True)
    assert not IdempotencyRecord.objects.exists()


def test_a_run_under_an_alias_removed_from_the_settings_needs_force(operator):
    record = make_record(state="running", lock_alias="gone")
    forget(operator, record)
    assert IdempotencyRecord.objects.exists()


@pytest.mark.parametrize("seen", [{"attempt": 1}, {"state": "running"}])
def test_a_record_that_has_changed_since_the_page_was_loaded_is_kept(operator, seen):
    """Between loading the page and the click, the run ended or another one began."""
    record = make_record(attempt=2)
    response = forget(operator, record, force=True, **seen)
    assert messages_on(response) == [
        "“shop.charge: 42” has changed since this page was loaded. Nothing was done."
    ]
    assert IdempotencyRecord.objects.exists()
    assert not LogEntry.objects.exists()


def test_a_deleted_record_redirects_to_the_list(operator):
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
def test_each_permission_allows_what_it_names(permissions, statuses, forgotten):
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


# -- many records, and several databases ---------------------------------------------------


def queries_of(client, url, using="default"):
    """The response, and the statements about records that it needed."""
    with CaptureQueriesContext(connections[using]) as captured:
        response = client.get(url)
    table = IdempotencyRecord._meta.db_table
    statements = [query["sql"] for query in captured.captured_queries]
    return response, [statement for statement in statements if table in statement]


def test_the_list_loads_no_results(admin_client):
    make_record(result="a result", error="an error")
    _, statements = queries_of(admin_client, RECORDS)
    assert statements
    assert not [text for text in statements if '"result"' in text or '"error"' in text]


def test_the_page_of_a_record_shows_its_result(admin_client):
    assert b"a result" in admin_client.get(page_of(make_record(result="a result"))).content


def test_only_as_many_records_are_counted_as_the_pages_can_show(admin_client, monkeypatch):
    monkeypatch.setattr(BoundedPaginator, "MAX_ROWS", 3)
    monkeypatch.setattr(IdempotencyRecordAdmin, "list_per_page", 2)
    for number in range(5):
        make_record(str(number))
    for query in ("", "?state__exact=succeeded"):
        response, statements = queries_of(admin_client, RECORDS + query)
        assert keys_on(response) == ["4", "3"]
        assert "Only the first 3 records in this order are shown" in response.content.decode()
        assert not [text for text in statements if "COUNT" in text]
        # The matching records are queried only once.
        assert len([text for text in statements if "LIMIT 4" in text]) == 1
        assert keys_on(admin_client.get(f"{RECORDS}?p=2&{query[1:]}")) == ["2"]
    assert "are shown" not in admin_client.get(RECORDS + "?q=1").content.decode()


def test_the_scopes_of_the_filter_are_found_without_reading_the_table(admin_client):
    """One index lookup for each, instead of DISTINCT over all rows."""
    for number in range(3):
        for scope in ("a", "b", "c"):
            make_record(str(number), scope=scope)
    response, statements = queries_of(admin_client, RECORDS + "?scope=b")
    assert keys_on(response) == ["2", "1", "0"]
    assert not [text for text in statements if "DISTINCT" in text]
    page = response.content.decode()
    assert all(f'href="?scope={scope}"' in page for scope in "ac")
    seeks = [text for text in statements if text.endswith("LIMIT 1")]
    for text in seeks:
        with connections["default"].cursor() as cursor:
            cursor.execute(f"EXPLAIN QUERY PLAN {text}")
            assert "USING COVERING INDEX dlock_record_scope" in str(cursor.fetchall())
    # One more lookup finds no further scope.
    assert len(seeks) == 4


def test_with_too_many_scopes_the_filter_is_replaced_by_the_search(admin_client, monkeypatch):
    monkeypatch.setattr(records, "MOST_SCOPES", 2)
    for scope in ("a", "b", "c"):
        make_record(scope=scope)
    page = admin_client.get(RECORDS).content.decode()
    assert 'href="?scope=b"' in page
    assert 'href="?scope=c"' not in page
    assert len(keys_on(admin_client.get(RECORDS + "?scope=c"))) == 1


def test_a_search_reads_only_the_latest_records_and_those_found_by_an_index(
    admin_client, monkeypatch
):
    """Searching for part of a text would read every row of a table with millions."""
    monkeypatch.setattr(BoundedPaginator, "MAX_ROWS", 2)
    make_record("order 7", task_id="old", scope="shop.refund")
    for number in range(3):
        make_record(f"order {number}", task_id="new")
    for query, keys in (
        ("order 7", ["order 7"]),
        ("order 0", ["order 0"]),
        ("shop.refund", ["order 7"]),
        ("order 7&scope=shop.charge", []),
        ("order", ["order 2", "order 1"]),
        ("shop", ["order 2", "order 1"]),
        ("new", ["order 2", "order 1"]),
        ("old", []),
        ("ORDER 1", ["order 1"]),
    ):
        response, statements = queries_of(admin_client, f"{RECORDS}?q={query}")
        assert keys_on(response) == keys, query
        for text in statements:
            # Another test covers how scopes are found.
            if 'FROM "django_dlock_idempotencyrecord"' in text and not text.endswith("LIMIT 1"):
                with connections["default"].cursor() as cursor:
                    cursor.execute(f"EXPLAIN QUERY PLAN {text}")
                    plan = [step for *_, step in cursor.fetchall()]
                assert not [step for step in plan if step.startswith("SCAN")], (text, plan)


def test_with_one_database_there_is_no_choice_of_databases(admin_client):
    make_record()
    assert b"database" not in admin_client.get(RECORDS).content.lower().split(b"<main")[1]


@pytest.fixture
def elsewhere(postgres_alias):
    IdempotencyRecord.objects.using(postgres_alias).all().delete()
    return postgres_alias


@pytest.mark.django_db(databases="__all__")
def test_records_of_another_database_are_shown_and_forgotten_there(elsewhere, operator):
    here = make_record("here")
    make_record("there", using=elsewhere)
    IdempotencyRecord.objects.using(elsewhere).update(id=here.pk)
    page = operator.get(RECORDS)
    assert keys_on(page) == ["here"]
    assert "?database=postgres" in page.content.decode()
    listed = operator.get(f"{RECORDS}?database={elsewhere}")
    assert keys_on(listed) == ["there"]
    link = re.search(r'href="(/admin[^"]*/change/[^"]*)"', listed.content.decode())
    detail = operator.get(html.unescape(link[1]))
    assert "order:<wbr>there" in detail.content.decode()
    link = re.search(r'href="(/admin[^"]*/forget/[^"]*)"', detail.content.decode())
    url = html.unescape(link[1])
    assert "there" in operator.get(url).content.decode()
    seen = {"attempt": 1, "state": "succeeded", "owner": "owner"}
    answer = operator.post(url, seen, follow=True)
    assert "was forgotten" in messages_on(answer)[0]
    assert keys_on(answer) == []
    assert not IdempotencyRecord.objects.using(elsewhere).exists()
    assert IdempotencyRecord.objects.get() == here


def test_a_project_without_a_default_database_shows_those_that_it_has(monkeypatch):
    handler = ConnectionHandler({"default": {}, "other": {"ENGINE": "django.db.backends.sqlite3"}})
    for module in (audit, databases):
        monkeypatch.setattr(module, "connections", handler)
    always = SimpleNamespace(db_for_read=lambda _: "other", allow_migrate=lambda *_, **__: True)
    monkeypatch.setattr(databases, "router", always)
    assert databases.databases() == ["other"]


def test_an_undefined_database_is_not_queried(admin_client):
    make_record()
    answer = admin_client.get(RECORDS + "?database=nowhere", follow=True)
    assert answer.status_code == 200


@pytest.mark.django_db(transaction=True, databases="__all__")
def test_a_database_without_the_table_is_named(postgres_alias, admin_client):
    table = IdempotencyRecord._meta.db_table
    with connections[postgres_alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO away")
    try:
        answer = admin_client.get(f"{RECORDS}?database={postgres_alias}", follow=True)
    finally:
        with connections[postgres_alias].cursor() as cursor:
            cursor.execute(f"ALTER TABLE away RENAME TO {table}")
    assert "postgres" in messages_on(answer)[0]


# -- lock events --------------------------------------------------------------------------


def make_event(name="order:1", **facts):
    values = {"event": "lost", "alias": "default", "when": timezone.now(), **facts}
    return LockEvent.objects.create(name=name, **values)


def test_events_can_be_searched_and_filtered(admin_client):
    make_event("order:1", reason="expired", detail={"held_for": 90.5, "task_name": "shop.charge"})
    make_event("order:2", event="broken", reason="operator", user="grace")
    page = admin_client.get(EVENTS).content.decode().replace("<wbr>", "")
    plain = re.sub("</?span[^>]*>", "", page)
    assert re.search(r'class="field-at[^>]*>(<a[^>]*>)?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d<', plain)
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


def test_the_operator_of_an_event_is_shown_only_to_those_who_may_see_users():
    event = make_event(event="broken", user="grace")
    client = visitor("view_lockevent")
    for url in (EVENTS, f"{EVENTS}{event.pk}/change/"):
        assert b"grace" not in client.get(url).content
    client.user.user_permissions.add(Permission.objects.get(codename="view_user"))
    for url in (EVENTS, f"{EVENTS}{event.pk}/change/"):
        assert b"grace" in client.get(url).content


def test_without_the_permission_to_see_users_a_query_string_does_not_find_them():
    make_event(user="grace")
    client = visitor("view_lockevent")
    query = f"{EVENTS}?user=grace"
    assert client.get(query).status_code == 400
    client.user.user_permissions.add(Permission.objects.get(codename="view_user"))
    assert len(client.get(query).context["cl"].result_list) == 1


def test_the_permission_to_see_users_is_that_of_the_projects_user_model(monkeypatch, rf):
    """The permission is not ``auth.view_user`` if ``AUTH_USER_MODEL`` is another model."""

    class Person:
        class _meta:
            app_label, model_name = "people", "person"

    monkeypatch.setattr("django_dlock.admin.base.get_user_model", lambda: Person)
    request, asked = rf.get("/"), []
    request.user = SimpleNamespace(has_perm=lambda name: asked.append(name) or True)
    assert may_see_users(request)
    assert asked == ["people.view_person"]


def test_staff_without_permission_see_no_events():
    assert visitor().get(EVENTS).status_code == 403


# -- follow-ups ----------------------------------------------------------------------------


def test_the_page_of_a_record_shows_the_follow_ups_of_its_runs(operator):
    record = make_record()
    now = timezone.now()
    for published in (None, now):
        FollowUp.objects.create(
            record=record,
            task="shop.receipt",
            task_id=f"published {published is not None}",
            message="the message itself",
            error="" if published else "the broker is away",
            created_at=now,
            published_at=published,
            expires_at=now,
        )
    page = operator.get(f"{RECORDS}{record.pk}/change/").content.decode()
    for text in ("shop.receipt", "published True", "published False", "the broker is away"):
        assert text in page
    assert "the message itself" not in page
    assert "follow_ups-0-error" not in page


def test_an_event_is_listed_with_its_reason_and_shown_with_short_numbers():
    detail = {"held_for": 1.2000000000000002, "host": "h", "pid": 7}
    event = make_event(event="lost", reason="holder_dead", detail=detail)
    client = visitor("view_lockevent")
    assert "holder dead" in client.get(EVENTS).content.decode()
    page = client.get(f"{EVENTS}{event.pk}/change/").content.decode()
    assert "1.2" in page
    assert "1.2000" not in page
