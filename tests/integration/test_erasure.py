"""Erasing what is kept of one key or person, on the databases that people use."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.contenttypes.models import ContentType
from django.core.management import CommandError, call_command
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils import timezone

from django_dlock import idempotent_view, keyed_digest, locked_view, locks, signals
from django_dlock.celery.options import DEFAULT
from django_dlock.core import dispatch
from django_dlock.keys import keyed_digests
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import (
    FailoverRecord,
    Fence,
    FollowUp,
    HeldLock,
    IdempotencyRecord,
    LockEvent,
    LockStatistics,
)
from django_dlock.records.erasure import Erasure, Subject, erase
from django_dlock.text.names import fit
from tests.support.deliveries import in_memory, recorded, task, work
from tests.support.tenants import active, scoped

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

KEY = "customer-4711"
NEAR = ("customer-47110", "customer-471", "CUSTOMER-4711", "x/customer-4711", "customer-4711 ")
"""Keys of others, of which no trace may go."""


@pytest.fixture(autouse=True)
def aliases(settings: Any) -> Iterator[None]:
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def database(database: str) -> str:
    for model in (IdempotencyRecord, FollowUp, LockEvent, LockStatistics, LogEntry, Fence):
        model.objects.using(database).all().delete()
    return database


def make_record(key: str, using: str = "default", **facts: Any) -> IdempotencyRecord:
    now = timezone.now()
    values = {
        "scope": "shop.charge",
        "state": "succeeded",
        "attempt": 1,
        "owner": "owner",
        "lock_alias": "default",
        "lock_name": "shop",
        "created_at": now,
        "started_at": now,
        "expires_at": now + dt.timedelta(days=7),
        **facts,
    }
    digest = IdempotencyRecord.digest_of(values["scope"], key)
    return IdempotencyRecord.objects.using(using).create(key=key, digest=digest, **values)


def make_follow_up(record: IdempotencyRecord, *, pending: bool = False) -> FollowUp:
    now = timezone.now()
    return FollowUp.objects.using(record._state.db).create(
        record=record,
        task="mail",
        task_id="t",
        message=KEY,
        created_at=now,
        expires_at=now,
        published_at=None if pending else now,
    )


def make_event(name: str, using: str = "default", **facts: Any) -> LockEvent:
    facts = {"event": "lost", "alias": "default", **facts}
    return LockEvent.objects.using(using).create(when=timezone.now(), name=name, **facts)


def make_statistics(group: str, using: str = "default") -> None:
    facts = {"period": 60, "start": 0, "metric": "acquires", "alias": "default", "label": ""}
    LockStatistics.objects.using(using).create(
        pk=LockStatistics.id_of(60, 0, "acquires", "default", group, ""),
        **{"group": group, "count": 1, "total": 0, "highest": 0, **facts},
        **dict.fromkeys(LockStatistics.BUCKETS, 0),
    )


def erased(using: str = "default", **subject: Any) -> Erasure:
    *_, done = erase(Subject(**subject), databases=[using], batch_size=2)
    return done


def keys(using: str = "default") -> set[str]:
    return set(IdempotencyRecord.objects.using(using).values_list("key", flat=True))


def names(using: str = "default") -> set[str]:
    return set(LockEvent.objects.using(using).values_list("name", flat=True))


# -- what fits -----------------------------------------------------------------------------


def test_all_traces_of_a_key_are_erased_and_none_of_others(database):
    for key in (KEY, *NEAR):
        for scope in ("shop.charge", "shop.refund"):
            make_follow_up(make_record(key, database, scope=scope))
        make_event(key, database)
        make_event("shop", database, event="rerun", detail={"scope": "s", "key": key})
        if key.strip() == key:
            make_statistics(key, database)
    done = erased(database, keys=[KEY])
    expected = {"records": 2, "follow_ups": 2, "lock_events": 2, "lock_statistics": 1}
    assert {kind: count for kind, count in done.erased.items() if count} == expected
    assert keys(database) == set(NEAR)
    assert FollowUp.objects.using(database).count() == 2 * len(NEAR)
    assert names(database) == {*NEAR, "shop"}
    assert LockEvent.objects.using(database).filter(name="shop").count() == len(NEAR)
    groups = LockStatistics.objects.using(database).values_list("group", flat=True)
    assert set(groups) == {key for key in NEAR if key.strip() == key}


def test_a_pattern_erases_what_belongs_to_locks(database):
    for name in ("cart:1", "cart:2", "Cart:3", "my cart:4", "cart"):
        make_record(name, database, lock_name=name)
        make_event(name, database)
    done = erased(database, names=["cart:*"])
    assert (done.erased["records"], done.erased["lock_events"]) == (2, 2)
    assert keys(database) == names(database) == {"Cart:3", "my cart:4", "cart"}


def test_the_lock_of_many_keys_does_not_lead_to_the_others(database):
    make_record(KEY, database)
    others = {"another", f"y/{KEY}"}
    for key in others:
        # Named as the locks of views are; but this is not the lock of that scope and key.
        make_record(key, database, lock_name="idempotent:shop")
    make_event("shop", database)
    erased(database, keys=[KEY])
    assert keys(database) == others
    assert names(database) == {"shop"}


def test_a_key_that_was_no_valid_name_is_found_by_what_it_was(database):
    for text in ("a\tb", "x" * 300):
        make_record(fit(text), database)
        assert erased(database, keys=[text]).erased["records"] == 1


def test_a_key_with_wildcards_of_the_database_stands_for_itself(database):
    for key in ("a%c", "a_c", "abc", "axxc"):
        make_record(key, database)
    erased(database, keys=["a%c"])
    erased(database, names=["a_*"])
    assert keys(database) == {"a_c", "abc", "axxc"}


def test_keyed_digests_are_made_again_with_each_secret(database, settings):
    names_then = [f"cart:{keyed_digest(KEY)}", f"{keyed_digest(KEY)}/orders"]
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "a new one"
    names_then.append(f"cart:{keyed_digest(KEY)}")
    assert len(set(keyed_digests(KEY))) == 2
    for name in (*names_then, f"cart:{keyed_digest('other')}"):
        make_record(name, database, lock_name=name)
        make_event(name, database)
    done = erased(database, keys=[KEY])
    assert (done.erased["records"], done.erased["lock_events"]) == (3, 3)
    assert keys(database) == names(database) == {f"cart:{keyed_digest('other')}"}


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        app.set_current()
        yield app
    locks.reset()


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("{order}", {"keys": ["7"]}),
        (["order"], {"keys": ["7"], "argument_names": ["note", "order"]}),
        (["order"], {"arguments": {"order": "7"}}),
        (["order", "note"], {"arguments": {"note": KEY, "order": "7"}}),
    ],
)
def test_the_digests_of_tasks_are_made_again(app, spec, asked):
    made = recorded(app, idempotency_key=spec)
    for order in (7, 8):
        made.delay(order, note=KEY)
        work(app)
    assert erased(**asked).erased["records"] == 1
    assert IdempotencyRecord.objects.get().task_id


def test_the_digest_of_all_arguments_names_the_lock_of_a_task(app):
    made = task(app, lock_key=DEFAULT)
    for order in (7, 8):
        make_event(made.dlock_options.lock_key((order, KEY), {}))
    assert erased(arguments={"order": "7", "note": KEY}).erased["lock_events"] == 1
    assert len(names()) == 1


@idempotent_view(required=True, idempotency_scope="pay")
def pay(request: Any) -> HttpResponse:
    return HttpResponse(f"paid by {request.user.pk}")


def paid(user: Any, key: str) -> IdempotencyRecord:
    known = set(IdempotencyRecord.objects.values_list("pk", flat=True))
    request = RequestFactory().post("/pay/", headers={"Idempotency-Key": key})
    request.user = user
    assert pay(request).status_code == 200
    return IdempotencyRecord.objects.exclude(pk__in=known).get()


def test_answers_of_a_view_are_found_by_user_and_by_header():
    grace, ada = (User.objects.create_user(name) for name in ("grace", "ada"))
    records = [paid(user, key) for user in (grace, ada) for key in ("k-1", "a/b")]
    for record in records:
        make_event(record.lock_name)
    done = erased(keys=["a/b"], users=["grace"])
    assert (done.erased["records"], done.erased["lock_events"]) == (3, 3)
    assert IdempotencyRecord.objects.get() == records[2]
    assert names() == {records[2].lock_name}


def test_a_deleted_user_is_found_by_the_primary_key():
    grace = User.objects.create_user("grace")
    paid(grace, "k-1")
    number = str(grace.pk)
    grace.delete()
    assert not erased(users=["grace"]).erased["records"]
    assert erased(users=[number]).erased["records"] == 1


@idempotent_view(client=lambda request: "c" * 200, idempotency_scope="pay")
def long_client(request: Any) -> HttpResponse:
    return HttpResponse("paid")


def test_a_key_of_a_view_that_is_a_digest_is_found_by_client_and_header(monkeypatch):
    request = RequestFactory().post("/pay/", headers={"Idempotency-Key": "k" * 100})
    request.user = AnonymousUser()
    assert long_client(request).status_code == 200
    assert len(IdempotencyRecord.objects.get().key) == 64
    assert not erased(keys=["k" * 100]).erased["records"]
    assert erased(keys=["k" * 100], users=["c" * 200]).erased["records"] == 1


def test_g12_only_the_traces_of_the_active_tenant_are_erased(app):
    """Users of two tenants have the same primary key."""
    charge, digested = recorded(app), recorded(app, idempotency_key=["order"])
    left = {}
    with scoped():
        for who in ("a", "b", ""):
            with active(who):
                paid(User(pk=1), "k-1")
                for made in (charge, digested):
                    made.delay(7)
            for _ in range(2):
                work(app)
            for record in IdempotencyRecord.objects.exclude(pk__in=left):
                left[record.pk] = who
                make_event(record.lock_name)
                detail = {"scope": record.scope, "key": record.key}
                make_event(record.lock_name, event="rerun", detail=detail)
        make_event("[a]7")
        make_event("[b]7")
        with active("a"):
            done = erased(users=["1"], keys=["7"], names=["*7"], argument_names=["order"])
        assert (done.erased["records"], done.erased["lock_events"]) == (3, 7)
        known = IdempotencyRecord.objects.values_list("pk", flat=True)
        assert sorted(left[pk] for pk in known) == ["", "", "", "b", "b", "b"]
        done = erased(users=["1"], keys=["7"], argument_names=["order"])
        assert (done.erased["records"], done.erased["lock_events"]) == (3, 4)
        assert erased(names=["[b]*"]).erased["lock_events"] == 7


def test_operators_lose_their_name_and_the_event_stays(database):
    make_event("order:1", database, event="broken", user="grace")
    make_event("order:2", database, event="broken", user="Grace")
    make_event("order:3", database, event="broken", user="ada")
    done = erased(database, users=["grace"])
    assert done.anonymised["lock_events"] == 1
    assert not done.erased["lock_events"]
    users = LockEvent.objects.using(database).order_by("name").values_list("user", flat=True)
    assert list(users) == ["", "Grace", "ada"]


def test_who_has_switched_a_store_stays_unnamed(database):
    facts = {"alias": "a", "key_prefix": "", "epoch": 1, "active": "one", "longest": 0, "quiet": 0}
    records = FailoverRecord.objects.using(database)
    for number, name in enumerate(("grace", "Grace")):
        records.create(pk=str(number), answered_at=0, switched_by=name, **facts)
    done = erased(database, users=["grace"])
    assert done.anonymised["failover_records"] == 1
    assert list(records.order_by("pk").values_list("switched_by", flat=True)) == ["", "Grace"]
    records.all().delete()


def test_the_log_of_the_admin_stays_without_the_key():
    user = User.objects.create_user("operator")

    def entry(model: Any, pk: str, text: str) -> LogEntry:
        return LogEntry.objects.create(
            user=user,
            content_type=ContentType.objects.get_for_model(model),
            object_id=pk,
            object_repr=text,
            action_flag=CHANGE,
            change_message="Forgotten.",
        )

    entry(IdempotencyRecord, "1", f"shop: charge: {KEY}")
    entry(HeldLock, f"default/{KEY}", KEY)
    others = [
        entry(IdempotencyRecord, "2", "shop.charge: another"),
        entry(HeldLock, "default/another", "another"),
        entry(User, KEY, KEY),
    ]
    done = erased(keys=[KEY])
    assert done.erased["admin_log"] == 2
    shown = LogEntry.objects.exclude(pk__in=[each.pk for each in others])
    assert {(each.object_id, each.object_repr) for each in shown} == {("", "(erased)")}
    assert {each.change_message for each in shown} == {"Forgotten."}
    assert not erased(keys=[KEY]).erased["admin_log"]


def test_without_a_criterion_nothing_is_erased(database):
    make_record(KEY, database)
    make_event("order:1", database)
    make_statistics("order", database)
    assert not erased(database).erased.total()
    assert keys(database) == {KEY}
    assert names(database) == {"order:1"}


# -- what stays ----------------------------------------------------------------------------


def run_under_way(key: str) -> IdempotencyRecord:
    record = make_record(key, state="running", lock_name=key)
    backend = locks["default"]
    request = LeaseRequest(name=key, owner=record.owner, ttl=30)
    assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)
    return record


def command(called: str = "purge_idempotency_records", /, **options: Any) -> tuple[int, str]:
    """The exit code and the output."""
    out = io.StringIO()
    try:
        call_command(called, stdout=out, stderr=io.StringIO(), **options)
    except CommandError as error:
        return error.returncode, out.getvalue()
    return 0, out.getvalue()


def test_g12_the_record_of_a_run_in_progress_is_erased_only_by_force():
    run_under_way(KEY)
    code, text = command(key=[KEY])
    assert code == 1
    assert "may be in progress" in text
    assert keys() == {KEY}
    assert command(key=[KEY], force=True)[0] == 0
    assert keys() == set()


def test_g13_pending_follow_ups_are_erased_only_by_force():
    make_follow_up(make_record(KEY), pending=True)
    code, text = command(key=[KEY])
    assert code == 1
    assert "publish_pending_followups" in text
    assert keys() == {KEY}
    assert FollowUp.objects.count() == 1
    assert command(key=[KEY], force=True)[0] == 0
    assert not FollowUp.objects.exists()


def test_a_record_that_changes_meanwhile_is_kept_and_told(monkeypatch):
    record = make_record(KEY)
    seen = Subject.in_record

    def change(subject: Subject, found: Any) -> Any:
        IdempotencyRecord.objects.filter(pk=record.pk).update(attempt=2)
        return seen(subject, found)

    monkeypatch.setattr(Subject, "in_record", change)
    code, text = command(key=[KEY])
    assert code == 1
    assert "changed meanwhile" in text
    assert keys() == {KEY}


def test_fences_are_told_and_kept(database):
    Fence.objects.using(database).create(
        digest="d",
        alias="default",
        key_prefix="",
        name=KEY,
        token=1,
        updated_at=timezone.now(),
    )
    done = erased(database, keys=[KEY])
    assert done.kept["fences"] == 1
    assert Fence.objects.using(database).exists()


# -- the commands --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["purge_idempotency_records", "purge_lock_events"])
def test_both_commands_erase_in_all_tables(name):
    make_follow_up(make_record(KEY))
    make_event(KEY)
    make_statistics(KEY)
    expected = {
        "records": 1,
        "follow_ups": 1,
        "lock_events": 1,
        "lock_statistics": 1,
        "admin_log": 0,
    }
    asked = {"key": [KEY], "name": ["nobody:*"], "format": "json"}
    code, text = command(name, dry_run=True, **asked)
    answer = json.loads(text)
    assert (code, answer["dry_run"], answer["erased"]) == (0, True, expected)
    assert keys() == {KEY}
    assert names() == {KEY}
    assert LockStatistics.objects.exists()
    code, text = command(name, **asked)
    answer = json.loads(text)
    assert (code, answer["dry_run"], answer["erased"]) == (0, False, expected)
    assert answer["not_found"] == [{"option": "--name", "value": "nobody:*"}]
    assert not keys()
    assert not names()
    assert not LockStatistics.objects.exists()
    assert json.loads(command(name, **asked)[1])["not_found"][0]["option"] == "--key"


def test_the_text_says_what_was_removed_and_what_was_not_found():
    make_record(KEY)
    code, text = command(key=[KEY, "\x1b[2J\u202e"])
    assert code == 0
    assert "     1  idempotency records" in text
    assert "Nothing was found for:" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "Not searched: " in text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("purge_idempotency_records", {"force": True}),
        ("purge_idempotency_records", {"dry_run": True}),
        ("purge_idempotency_records", {"key": [""]}),
        ("purge_idempotency_records", {"key": ["7\0"]}),
        ("purge_lock_events", {"name": ["\udc80*"]}),
        ("purge_idempotency_records", {"argument": ["order=\0"]}),
        ("purge_idempotency_records", {"argument": ["order"]}),
        ("purge_idempotency_records", {"argument": ["=7"]}),
        ("purge_idempotency_records", {"key": ["7"], "batch_size": 0}),
        ("purge_idempotency_records", {"key": ["7"], "using": "nowhere"}),
        ("purge_lock_events", {"key": ["7"], "older_than": 1.0}),
    ],
)
def test_wrong_usage_erases_nothing(name, options):
    make_record("7")
    assert command(name, **options)[0] == 2
    assert keys() == {"7"}


def test_the_arguments_of_tasks_that_the_app_knows_are_tried(app):
    made = recorded(app, idempotency_key=["order"])
    made.delay(7)
    work(app)
    assert command(key=["7"])[0] == 0
    assert not keys()


def test_all_databases_are_searched(postgres_alias):
    make_record(KEY, postgres_alias)
    make_record(KEY)
    assert command(key=[KEY])[0] == 0
    assert keys(postgres_alias) == keys() == set()


class EventsElsewhere:
    """A router that keeps the records in one database and the lock events in another."""

    def __init__(self, database: str) -> None:
        self.database = database

    def allow_migrate(self, db: str, app_label: str, model_name: str = "", **_: Any) -> Any:
        if app_label != "django_dlock":
            return None
        return (db == self.database) == (model_name == "lockevent")


def test_a_database_that_has_lock_events_alone_is_searched(postgres_alias, settings):
    make_event(KEY, postgres_alias)
    make_record(KEY)
    settings.DATABASE_ROUTERS = [EventsElsewhere(postgres_alias)]
    assert command(key=[KEY])[0] == 0
    assert not keys()
    assert not names(postgres_alias)


# -- keys of views that are lists ----------------------------------------------------------


@idempotent_view(required=True, idempotency_scope="pay", client=["request.user.pk"])
def pay_by_list(request: Any) -> HttpResponse:
    return HttpResponse("paid")


@locked_view(["request.user.pk", "slug"])
def report(request: Any, slug: str) -> HttpResponse:
    return HttpResponse("done")


@contextmanager
def signals_of_acquired(names: list[str]) -> Iterator[None]:
    """Adds the names of the locks that are acquired meanwhile."""

    def note(sender: object, *, name: str, **_: Any) -> None:
        names.append(name)

    signals.acquired.connect(note)
    try:
        yield
        dispatch.flush()
    finally:
        signals.acquired.disconnect(note)


def of_user(user: User) -> Any:
    request = RequestFactory().post("/", headers={"Idempotency-Key": "k-1"})
    request.user = user
    return request


def test_answers_for_a_list_that_is_the_user_alone_are_found_by_user():
    grace, ada = (User.objects.create_user(name) for name in ("grace", "ada"))
    for user in (grace, ada):
        assert pay_by_list(of_user(user)).status_code == 200
    mine, others = IdempotencyRecord.objects.order_by("pk")
    assert erased(users=["grace"]).erased["records"] == 1
    assert IdempotencyRecord.objects.get() == others != mine


def test_the_digest_of_fields_of_a_request_is_found_by_their_names():
    user, seen = User.objects.create_user("grace"), []
    with signals_of_acquired(seen):
        assert report(of_user(user), "q3").status_code == 200
    make_event(seen[0])
    asked = [f"request.user.pk={user.pk}", "slug=q3"]
    assert command(argument=asked)[0] == 0
    assert not names()
    assert command(argument=["1a=x"])[0] == 2
