"""An operator runs the task of a record again, and publishes what is pending."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
from types import SimpleNamespace

import pytest
from celery import Celery
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import DatabaseError, InterfaceError, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from kombu.exceptions import OperationalError
from kombu.utils import json

from django_dlock import locks
from django_dlock.admin import record_steps
from django_dlock.admin.base import atomic_in
from django_dlock.celery.publishing import follow_ups, rerun
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import FollowUp, IdempotencyRecord, LockEvent
from django_dlock.operators import audit
from django_dlock.records import idempotency
from django_dlock.records.idempotency import ClaimRequest
from testproject.shop.models import Effect
from tests.support.deliveries import effects, in_memory, recorded, states, waiting, work

RECORDS = "/admin/django_dlock/idempotencyrecord/"
FOLLOW_UPS = "/admin/django_dlock/followup/"

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture
def app():
    with in_memory() as app:
        app.set_current()
        yield app
    locks.reset()


def visitor(*permissions):
    user = User.objects.create_user(f"visitor-{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    client.user = user
    return client


@pytest.fixture
def operator():
    return visitor(
        "view_idempotencyrecord",
        "rerun_idempotencyrecord",
        "view_results_idempotencyrecord",
        "view_followup",
        "publish_followup",
        "view_lockevent",
    )


def run_again(client, record, *, force=False, **seen):
    answers = {
        "attempt": record.attempt,
        "state": record.state,
        "owner": record.owner,
        **seen,
        **({"force": "on"} if force else {}),
    }
    return client.post(f"{RECORDS}{record.pk}/rerun/", answers, follow=True)


def messages_on(response):
    return [str(message) for message in response.context["messages"]]


def charged(app, order=7, **options):
    """A task that has charged an order; and its record."""
    made = recorded(app, **options)
    made.apply_async((order,), {"note": "by hand"})
    work(app)
    return made, IdempotencyRecord.objects.get()


@pytest.fixture
def broken_broker(monkeypatch):
    """Nothing can be published."""

    def refuse(*_, **__):
        raise OperationalError("the broker is down")

    with monkeypatch.context() as patch:
        patch.setattr(Celery, "send_task", refuse)
        yield patch


# -- run again -----------------------------------------------------------------------------


def test_a_task_runs_again_with_the_same_arguments_under_a_new_id(app, operator):
    _made, record = charged(app)
    assert effects() == 1
    response = run_again(operator, record)
    assert IdempotencyRecord.objects.count() == 0
    follow_up = FollowUp.objects.get()
    assert follow_up.published_at is not None
    assert messages_on(response) == [f"“{record}” runs again, as task {follow_up.task_id}."]
    message = work(app)
    assert message.headers["id"] == follow_up.task_id != record.task_id
    assert message.payload[:2] == [[7], {"note": "by hand"}]
    assert waiting(app) is None
    assert (effects(), states()) == (2, ["succeeded"])
    assert IdempotencyRecord.objects.get().task_id == follow_up.task_id


def test_a_rerun_is_logged_and_becomes_a_lock_event(app, operator):
    _made, record = charged(app)
    run_again(operator, record)
    entry, event, follow_up = (
        LogEntry.objects.get(),
        LockEvent.objects.get(),
        FollowUp.objects.get(),
    )
    assert entry.user == operator.user
    assert entry.change_message == (
        f"Run again in state succeeded at attempt 1, as task {follow_up.task_id}."
    )
    assert (event.event, event.name, event.reason) == ("rerun", "order:7", "operator")
    assert event.user == operator.user.username
    assert event.detail["key"] == "7"
    assert (event.detail["task_id"], event.detail["new_task_id"]) == (
        record.task_id,
        follow_up.task_id,
    )


def test_g13_a_rerun_is_not_lost_if_the_broker_is_down(app, operator, broken_broker):
    _made, record = charged_despite(app, broken_broker)
    response = run_again(operator, record)
    (text,) = messages_on(response)
    assert "is not published yet" in text
    assert "the broker is down" in text
    assert states() == []
    assert "the broker is down" in FollowUp.objects.get().error
    broken_broker.undo()
    assert follow_ups.publish_all("default", older_than=dt.timedelta(0)) == 1
    work(app)
    assert effects() == 2


def charged_despite(app, broken_broker):
    """As ``charged``, before the broker breaks."""
    send = Celery.__dict__["send_task"]
    broken_broker.undo()
    found = charged(app)
    broken_broker.setattr(Celery, "send_task", send)
    return found


def test_g13_a_rerun_is_published_later_if_the_process_dies_after_the_commit(app):
    _made, record = charged(app)
    follow_up = rerun.forget_and_write(record)
    # The process dies here.
    assert waiting(app) is None
    assert follow_ups.publish_all("default", older_than=dt.timedelta(0)) == 1
    assert work(app).headers["id"] == follow_up.task_id
    assert effects() == 2


def test_g12_a_rerun_that_is_published_twice_does_not_run_after_it_has_failed(app):
    """The process died after the broker had it, and before the row said so."""
    ran = []

    def body(self, order):
        ran.append(order)
        if len(ran) == 2:
            raise ValueError("declined")

    recorded(app, body).delay(7)
    work(app)
    follow_up = rerun.forget_and_write(IdempotencyRecord.objects.get())
    message = follow_up.message
    assert rerun.publish(follow_up)
    FollowUp.objects.update(published_at=None, message=message)
    assert follow_ups.publish_all("default", older_than=dt.timedelta(0)) == 1
    assert work(app).headers["id"] == work(app).headers["id"]
    assert (len(ran), states()) == (2, ["failed"])


def test_g13_what_cannot_be_recorded_is_not_done(app, operator, monkeypatch):
    _made, record = charged(app)

    def fail(*_, **__):
        raise DatabaseError("no such table")

    monkeypatch.setattr(audit, "record", fail)
    assert "was not run again" in messages_on(run_again(operator, record))[0]
    assert states() == ["succeeded"]
    assert FollowUp.objects.count() == LogEntry.objects.count() == 0
    assert waiting(app) is None


def test_g13_a_rerun_whose_commit_is_not_answered_may_have_happened(app, operator, monkeypatch):
    _made, record = charged(app)
    monkeypatch.setattr(record_steps, "atomic_in", unanswered_commit)
    (text,) = messages_on(run_again(operator, record))
    assert "may or may not have been forgotten" in text
    assert "the reply is lost" in text
    assert states() == []
    assert follow_ups.publish_all("default", older_than=dt.timedelta(0)) == 1
    work(app)
    assert effects() == 2


def test_a_record_whose_deletion_is_not_answered_may_be_forgotten(app, monkeypatch):
    _made, record = charged(app)
    monkeypatch.setattr(record_steps, "atomic_in", unanswered_commit)
    answers = {"attempt": record.attempt, "state": record.state, "owner": record.owner}
    client = visitor("view_idempotencyrecord", "forget_idempotencyrecord")
    response = client.post(f"{RECORDS}{record.pk}/forget/", answers, follow=True)
    assert "may or may not have been forgotten" in messages_on(response)[0]
    assert states() == []


@contextlib.contextmanager
def unanswered_commit(*databases):
    """The transactions are committed, but the reply to it is lost."""
    with atomic_in(*databases):
        yield
    raise InterfaceError("the reply is lost")


def test_g12_a_record_that_has_changed_is_not_run_again(app, operator):
    _made, record = charged(app)
    for seen in ({"attempt": 2}, {"state": "failed"}, {"owner": "another"}):
        (text,) = messages_on(run_again(operator, record, **seen))
        assert "has changed since this page was loaded" in text
    assert states() == ["succeeded"]
    assert FollowUp.objects.count() == LogEntry.objects.count() == LockEvent.objects.count() == 0


def test_g12_a_record_whose_run_is_in_progress_is_run_again_only_by_force(app, operator):
    _made, record = charged(app)
    IdempotencyRecord.objects.update(state="running", finished_at=None, owner="now")
    record.refresh_from_db()
    backend = locks["default"]
    request = LeaseRequest(name=record.lock_name, owner=record.owner, ttl=30)
    assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)
    assert "in progress" in run_again(operator, record).content.decode()
    assert states() == ["running"]
    assert FollowUp.objects.count() == 0
    run_again(operator, record, force=True)
    assert states() == []
    assert FollowUp.objects.count() == 1


def test_g12_a_task_that_has_replaced_itself_is_run_again_only_by_force(app, operator):
    _made, record = charged(app)
    IdempotencyRecord.objects.update(ending="replaced")
    assert "the replacement has not ended" in run_again(operator, record).content.decode()
    assert states() == ["succeeded"]
    run_again(operator, record, force=True)
    assert states() == []


def test_opening_the_confirmation_changes_nothing_and_warns_of_a_second_effect(app, operator):
    _made, record = charged(app)
    page = operator.get(f"{RECORDS}{record.pk}/rerun/?force=on").content.decode()
    assert "its effects will happen a second time" in page
    assert "by hand" in page
    assert states() == ["succeeded"]


def test_within_a_request_that_is_one_transaction_it_is_published_at_the_end(app, operator):
    _made, record = charged(app)
    connections["default"].settings_dict["ATOMIC_REQUESTS"] = True
    try:
        (text,) = messages_on(run_again(operator, record))
    finally:
        connections["default"].settings_dict["ATOMIC_REQUESTS"] = False
    assert "once this request is committed" in text
    work(app)
    assert effects() == 2


def test_without_stored_arguments_a_task_cannot_be_run_again(app, operator):
    _made, record = charged(app, store_arguments=False)
    assert record.message is None
    page = operator.get(f"{RECORDS}{record.pk}/change/").content.decode()
    assert "Not stored" in page
    assert "/rerun/" not in page
    assert "cannot be run again" in messages_on(run_again(operator, record))[0]
    assert states() == ["succeeded"]


def test_only_users_with_the_permission_run_again_and_see_arguments(app):
    _made, record = charged(app)
    for permissions in (
        ("view_idempotencyrecord", "forget_idempotencyrecord"),
        ("rerun_idempotencyrecord",),
    ):
        client = visitor(*permissions)
        assert run_again(client, record).status_code == 403
    viewer = visitor("view_idempotencyrecord")
    page = viewer.get(f"{RECORDS}{record.pk}/change/").content.decode()
    assert "by hand" not in page
    assert "/rerun/" not in page
    assert states() == ["succeeded"]


# -- what is stored ------------------------------------------------------------------------


def request_of(**facts):
    return SimpleNamespace(delivery_info=facts, headers=None)


def stored(args, kwargs=None, *, wanted=True, **info):
    task = SimpleNamespace(name="shop.charge", store_arguments=wanted)
    return rerun.encode(task, request_of(**info), args, kwargs or {})


def test_the_queue_and_the_priority_of_the_message_are_kept():
    def options_of(**info):
        return json.loads(stored((1,), **info))["options"]

    assert options_of(exchange="", routing_key="slow", priority=3) == {
        "exchange": "",
        "routing_key": "slow",
        "priority": 3,
    }
    # The exact queue is known, and other queues of the exchange must not get a copy.
    assert options_of(exchange="all", routing_key="a.b", dlock_queue="slow") == {
        "exchange": "",
        "routing_key": "slow",
    }
    assert options_of(exchange=None, routing_key=None) == {}


def test_arguments_that_json_does_not_return_as_they_were_are_not_stored():
    when = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)
    assert rerun.arguments_of(stored((1, "a", when), {"b": [1]})) == ([1, "a", when], {"b": [1]})
    assert stored((object(),)) is None
    assert stored(({1: "a number as key"},)) is None
    assert stored(((1, 2),)) is None
    assert stored((1,), wanted=False) is None


def test_a_message_that_is_too_long_is_not_stored():
    assert stored(("x" * (rerun.MAX_MESSAGE - 200),)) is not None
    assert stored(("x" * rerun.MAX_MESSAGE,)) is None


def claim_request(owner, **facts):
    values = {
        "scope": "s",
        "key": "k",
        "payload": "p",
        "ttl": dt.timedelta(days=7),
        "lock_alias": "default",
        "lock_name": "order:1",
        "owner": owner,
        **facts,
    }
    return ClaimRequest(**values)


def test_the_message_costs_no_statement_of_its_own(database):
    def statements(owner, **facts):
        with CaptureQueriesContext(connections[database]) as queries:
            claimed = idempotency.claim(
                claim_request(owner, **facts), holds=lambda *_: False, using=database
            )
        idempotency.mark_failed(claimed, "again")
        return len(queries)

    IdempotencyRecord.objects.using(database).all().delete()
    inserted = statements("a", message="{}")
    begun = statements("b", message='{"second": true}')
    assert IdempotencyRecord.objects.using(database).get().message == '{"second": true}'
    IdempotencyRecord.objects.using(database).all().delete()
    assert (inserted, begun) == (statements("c"), statements("d"))


def test_the_message_of_a_task_that_has_replaced_itself_is_that_of_its_first_run(database):
    IdempotencyRecord.objects.using(database).all().delete()
    first = idempotency.claim(
        claim_request("a", task_id="t", message="first"), holds=lambda *_: False, using=database
    )
    idempotency.complete(first, ending="replaced")
    idempotency.claim(
        claim_request("b", task_id="t", step=1, message="second"),
        holds=lambda *_: False,
        using=database,
    )
    assert IdempotencyRecord.objects.using(database).get().message == "first"


def test_g12_a_record_is_deleted_and_its_message_written_in_one_step(database):
    IdempotencyRecord.objects.using(database).all().delete()
    FollowUp.objects.using(database).all().delete()
    message = stored((1,))
    claimed = idempotency.claim(
        claim_request("a", message=message), holds=lambda *_: False, using=database
    )
    old = IdempotencyRecord.objects.using(database).get()
    idempotency.mark_failed(claimed, "x")
    assert rerun.forget_and_write(old) is None
    assert FollowUp.objects.using(database).count() == 0
    record = IdempotencyRecord.objects.using(database).get()
    follow_up = rerun.forget_and_write(record)
    written = FollowUp.objects.using(database).get()
    assert written.task_id == follow_up.task_id
    assert written.published_at is None
    assert written.expires_at - written.created_at == record.expires_at - record.finished_at
    assert json.loads(written.message)["options"]["task_id"] == written.task_id
    assert not IdempotencyRecord.objects.using(database).exists()


# -- the page of a record --------------------------------------------------------------------


def test_the_page_of_a_record_says_what_ran_where_and_what_it_returned(app, operator):
    def body(self, order, note=""):
        Effect.objects.create(order_number=order, by="x")
        return {"order": order, "name": "Müller"}

    made = recorded(app, body)
    made.apply_async((7,), {"note": "by hand"})
    work(app)
    record = IdempotencyRecord.objects.get()
    page = operator.get(f"{RECORDS}{record.pk}/change/").content.decode()
    assert "&quot;name&quot;: &quot;Müller&quot;" in page
    assert "&quot;note&quot;: &quot;by hand&quot;" in page
    assert record.worker in page
    assert record.worker.endswith(str(os.getpid()))
    assert "free" in page
    assert "/admin/django_dlock/lockevent/?alias=default&amp;name=order%3A7" in page


def test_the_page_of_a_record_shows_what_happened_to_its_key(app, operator):
    _made, record = charged(app)
    audit.record("lost", name="order:7", alias="default", reason="expired")
    audit.record("lost", name="order:8", alias="default", reason="of_another_lock")
    run_again(operator, record)
    work(app)
    new = IdempotencyRecord.objects.get()
    page = operator.get(f"{RECORDS}{new.pk}/change/").content.decode()
    assert "Run again in state succeeded" in page
    assert "expired" in page
    assert "of another lock" not in page
    assert f"<td>{operator.user}</td>" not in page
    viewer = visitor("view_idempotencyrecord")
    assert "expired" not in viewer.get(f"{RECORDS}{new.pk}/change/").content.decode()


def test_a_record_its_lock_and_its_events_lead_to_one_another(app):
    charged(app)
    event = audit.record("lost", name="order:7", alias="default", reason="expired")
    client = visitor("view_idempotencyrecord", "view_lockevent", "view_heldlock")
    held = 'href="/admin/django_dlock/heldlock/default_2Forder_3A7/change/"'
    page = client.get(f"/admin/django_dlock/lockevent/{event.pk}/change/").content.decode()
    assert 'href="/admin/django_dlock/idempotencyrecord/?q=order%3A7"' in page
    assert held in page
    record = IdempotencyRecord.objects.get()
    url = f"{RECORDS}{record.pk}/change/"
    assert held not in client.get(url).content.decode()
    backend = locks["default"]
    request = LeaseRequest(name="order:7", owner="o", ttl=30)
    assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)
    page = client.get(url).content.decode()
    assert held in page
    assert "held by another run" in page
    lock = client.get("/admin/django_dlock/heldlock/default_2Forder_3A7/change/")
    assert f'href="{url}"' in lock.content.decode()


# -- follow-ups ------------------------------------------------------------------------------


def make_follow_up(app, **facts):
    now = timezone.now()
    signature = recorded(app).si(3)
    signature.options["task_id"] = facts.get("task_id", "t")
    values = {
        "record_id": 1,
        "task": signature.task,
        "task_id": "t",
        "message": json.dumps(signature),
        "created_at": now,
        "expires_at": now,
        **facts,
    }
    return FollowUp.objects.create(**values)


def ids_on(response):
    return [row.task_id for row in response.context["cl"].result_list]


def publish(client, *rows):
    return client.post(
        FOLLOW_UPS + "?published=all",
        {"action": "publish_selected", "_selected_action": [row.pk for row in rows]},
        follow=True,
    )


def test_the_list_of_follow_ups_shows_pending_ones_first(app, operator):
    make_follow_up(app, task_id="pending", error="no broker")
    make_follow_up(app, task_id="done", published_at=timezone.now())
    listed = operator.get(FOLLOW_UPS)
    assert ids_on(listed) == ["pending"]
    assert "no broker" in listed.content.decode()
    assert ids_on(operator.get(FOLLOW_UPS + "?published=yes")) == ["done"]
    assert ids_on(operator.get(FOLLOW_UPS + "?published=all")) == ["done", "pending"]


def test_chosen_follow_ups_are_published_and_logged(app, operator):
    chosen = make_follow_up(app, task_id="chosen")
    make_follow_up(app, task_id="not chosen")
    done = make_follow_up(app, task_id="done", published_at=timezone.now())
    response = publish(operator, chosen, done)
    assert messages_on(response) == ["1 outbox message was published."]
    assert waiting(app).headers["id"] == "chosen"
    assert waiting(app) is None
    chosen.refresh_from_db()
    assert chosen.published_at is not None
    assert LogEntry.objects.get().object_id == str(chosen.pk)


def test_follow_ups_stay_pending_if_the_broker_is_down(app, operator, broken_broker):
    row = make_follow_up(app)
    response = publish(operator, row)
    assert "the broker is down" in messages_on(response)[-1]
    row.refresh_from_db()
    assert row.published_at is None


def test_without_the_permission_follow_ups_are_not_published(app):
    row = make_follow_up(app)
    viewer = visitor("view_followup")
    assert b"publish_selected" not in viewer.get(FOLLOW_UPS).content
    publish(viewer, row)
    row.refresh_from_db()
    assert row.published_at is None
    assert visitor("publish_followup").get(FOLLOW_UPS).status_code == 403


@pytest.mark.parametrize(
    ("query", "title"),
    [("", "Pending"), ("?published=yes", "Published"), ("?published=all", "Outbox messages")],
)
def test_the_list_of_follow_ups_says_which_it_shows(app, query, title):
    page = visitor("view_followup").get(FOLLOW_UPS + query).content.decode()
    assert title in re.search("<title>(.*?)[|]", page, re.DOTALL)[1]


def test_the_page_of_a_record_shows_arguments_in_the_words_of_the_publisher(app, operator):
    made = recorded(app)
    made.apply_async((7,), {"note": "4111-1111"}, kwargsrepr="{'note': '***'}")
    work(app)
    record = IdempotencyRecord.objects.get()
    for step in ("change", "rerun"):
        page = operator.get(f"{RECORDS}{record.pk}/{step}/").content.decode()
        assert "4111" not in page
        assert "&#x27;***&#x27;" in page
        assert "7" in page
