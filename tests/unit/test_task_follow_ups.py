"""The messages that a run sends after its commit: follow-ups and replacements."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, current_app, group
from celery.exceptions import Ignore
from celery.worker.request import Request
from django import db
from django.core.management import CommandError, call_command
from django.db import transaction
from kombu.exceptions import OperationalError

from django_dlock import locks
from django_dlock.celery.publishing import follow_ups, requeue
from django_dlock.databases import time as database_time
from django_dlock.models import FollowUp, IdempotencyRecord
from django_dlock.records import idempotency, retention
from testproject.shop.models import Effect
from tests.support.deliveries import effects, held, in_memory, recorded, states, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@pytest.fixture
def mail(app: Celery) -> Any:
    """A task that bodies send."""
    return task(app)


@pytest.fixture
def current(app: Celery) -> Iterator[None]:
    """Makes the app the current one of the process, where commands find it."""
    before = current_app._get_current_object()
    app.set_current()
    yield
    before.set_current()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No follow-up can be published."""
    with monkeypatch.context() as patched:

        def refuse(*args: Any, **options: Any) -> Any:
            raise OperationalError("the broker is away")

        patched.setattr(follow_ups, "confirming", refuse)
        yield patched


def sending(app: Celery, mail: Any, **options: Any) -> Any:
    def body(self, order):
        Effect.objects.create(order_number=order, by="sends")
        return self.current_run.send(mail.s(order)).id

    return recorded(app, body, **options)


def pending() -> list[str]:
    return list(FollowUp.objects.filter(published_at=None).values_list("task_id", flat=True))


def messages(app: Celery) -> list[Any]:
    return list(iter(lambda: waiting(app), None))


# -- sending --------------------------------------------------------------------------


def test_a_follow_up_is_published_after_the_commit_and_the_release(app, mail, monkeypatch):
    def body(self, order):
        result = self.current_run.send(mail.s(order))
        seen.append((waiting(app), len(pending())))
        return result.id

    def publish(*args: Any) -> Any:
        seen.append((states(), locks["default"].list()))
        return real(*args)

    seen: list[Any] = []
    real = follow_ups.publish
    monkeypatch.setattr(follow_ups, "publish", publish)
    sent = recorded(app, body).delay(1)
    work(app)
    (message,) = messages(app)
    assert seen == [(None, 1), (["succeeded"], [])]
    assert message.headers["id"] == sent.result
    assert (message.headers["parent_id"], message.headers["root_id"]) == (sent.id, sent.id)
    assert pending() == []
    assert [child.id for child in sent.children] == [sent.result]


def test_g12_a_run_that_is_rolled_back_sends_nothing(app, mail):
    def body(self, order):
        self.current_run.send(mail.s(order))
        if not self.request.retries:
            raise self.retry(countdown=0)
        with transaction.atomic():
            self.current_run.send(mail.s(2))
            transaction.set_rollback(True)

    recorded(app, body).delay(1)
    work(app)
    assert FollowUp.objects.count() == 0
    work(app)
    assert [message.payload[0] for message in messages(app)] == [[1]]


def test_g13_a_worker_that_dies_after_the_commit_loses_no_follow_up(app, mail, monkeypatch):
    made = sending(app, mail)
    with monkeypatch.context() as patched:
        patched.setattr(follow_ups.FollowUps, "publish", lambda self: None)
        sent = made.delay(1)
        work(app)
    (task_id,) = pending()
    assert waiting(app) is None
    app.backend.forget(sent.id)
    made.apply_async((1,), task_id=sent.id)
    work(app)
    assert [message.headers["id"] for message in messages(app)] == [task_id]
    assert (sent.state, sent.result, effects(), pending()) == ("SUCCESS", task_id, 1, [])
    made.apply_async((1,), task_id=sent.id)
    work(app)
    assert messages(app) == []


def test_g13_if_a_follow_up_finds_no_broker_the_message_is_redelivered(app, mail, monkeypatch):
    made = sending(app, mail)
    sent = made.delay(1)

    def refuse(*args: Any, **options: Any) -> Any:
        raise OperationalError("the broker is away")

    with monkeypatch.context() as patched:
        patched.setattr(type(mail), "apply_async", refuse)
        work(app)
    assert (sent.state, states(), effects()) == ("RETRY", ["succeeded"], 1)
    assert "away" in FollowUp.objects.get().error
    work(app)
    assert (sent.state, effects(), pending()) == ("SUCCESS", 1, [])
    assert [message.headers["id"] for message in messages(app)] == [sent.result]


def test_g13_a_follow_up_whose_key_asks_a_database_that_is_away_is_redelivered(app):
    away: list[bool] = []

    def key(order):
        if away:
            raise db.OperationalError("the connection is closed")
        return str(order)

    mail = task(app, lock_key=key, unique_until="done")
    sent = sending(app, mail).delay(1)
    away.append(True)
    work(app)
    assert (sent.state, states(), effects()) == ("RETRY", ["succeeded"], 1)
    away.clear()
    work(app)
    assert (sent.state, effects(), pending()) == ("SUCCESS", 1, [])
    assert [message.headers["id"] for message in messages(app)] == [sent.result]


@pytest.mark.parametrize("lasts", [False, True])
def test_g13_no_error_of_a_database_makes_committed_work_a_failure(
    app, mail, monkeypatch, caplog, lasts
):
    """Behind a pooler, a prepared statement may be gone; no table says that this passes."""
    begun: list[int] = []

    def body(self, order):
        begun.append(order)
        return self.current_run.send(mail.s(order)).id

    def gone(*args: Any, **options: Any) -> Any:
        raise db.OperationalError() from Gone()

    sent = recorded(app, body, max_attempts=2).delay(1)
    with monkeypatch.context() as patched:
        patched.setattr(follow_ups, "pending", gone)
        work(app)
        assert (sent.state, states(), len(pending())) == ("RETRY", ["succeeded"], 1)
        if lasts:
            work(app)
            assert (sent.state, len(pending())) == ("SUCCESS", 1)
            assert "publish_pending_followups" in caplog.text
    if not lasts:
        work(app)
        assert (sent.state, pending()) == ("SUCCESS", [])
    assert len(begun) == 1


class Gone(Exception):
    """As a driver of PostgreSQL says that a prepared statement does not exist."""

    sqlstate = "26000"


def test_another_task_of_the_key_does_not_publish_the_follow_ups_of_the_first_one(
    app, mail, monkeypatch
):
    made = sending(app, mail)
    with monkeypatch.context() as patched:
        patched.setattr(follow_ups.FollowUps, "publish", lambda self: None)
        made.delay(1)
        work(app)
    again = made.delay(1)
    work(app)
    assert (again.state, len(pending()), waiting(app)) == ("SUCCESS", 1, None)


def test_if_a_follow_up_can_never_be_published_the_message_is_not_redelivered(
    app, mail, monkeypatch, caplog
):
    def refuse(*args: Any, **options: Any) -> Any:
        raise LookupError("no such queue")

    made = sending(app, mail)
    with monkeypatch.context() as patched:
        patched.setattr(type(mail), "apply_async", refuse)
        sent = recorded_call(app, made)
    assert (sent.state, len(pending())) == ("SUCCESS", 1)
    assert "cannot be published" in caplog.text
    assert "no such queue" in FollowUp.objects.get().error


def recorded_call(app: Celery, made: Any) -> Any:
    """A task that is published without ``apply_async``, and then run."""
    task_id = "an id"
    app.send_task(made.name, (1,), task_id=task_id)
    work(app)
    return made.AsyncResult(task_id)


def test_options_of_a_follow_up_keep_their_meaning_from_the_time_of_sending(app, mail):
    def body(self, order):
        signature = mail.s(order).set(countdown=60, expires=3600, priority=3, headers={"x": "y"})
        self.current_run.send(signature)

    recorded(app, body).delay(1)
    work(app)
    (message,) = messages(app)
    assert message.headers["eta"] < message.headers["expires"]
    assert (message.properties["priority"], message.headers["x"]) == (3, "y")


def test_unsupported_follow_ups_are_refused_at_once(app, mail):
    def body(self, order):
        run = self.current_run
        with pytest.raises(TypeError, match=r"not a chain.*starts the canvas"):
            run.send(chain(mail.s(1), mail.si(2)))
        with pytest.raises(TypeError, match="not a group"):
            run.send(group(mail.s(1), mail.s(2)))
        with pytest.raises(TypeError, match="not a str"):
            run.send("mail")
        with pytest.raises(TypeError, match="cannot be recorded"):
            run.send(mail.s(object()))
        with pytest.raises(ValueError, match="characters"):
            run.send(mail.s("x" * follow_ups.MAX_MESSAGE))
        return "refused"

    sent = recorded(app, body).delay(1)
    work(app)
    assert sent.result == "refused"
    assert FollowUp.objects.count() == 0


@pytest.mark.parametrize("make", [task, recorded])
def test_follow_ups_need_the_transaction_of_a_record(app, mail, make):
    def body(self, order):
        self.current_run.send(mail.s(order))

    options = {"atomic": False} if make is recorded else {}
    sent = make(app, body, **options).delay(1)
    work(app)
    assert isinstance(sent.result, RuntimeError)
    assert "atomic=True" in str(sent.result)


def test_follow_ups_cannot_be_sent_after_the_body(app, mail):
    runs = []

    def body(self, order):
        runs.append(self.current_run)

    recorded(app, body).delay(1)
    work(app)
    with pytest.raises(RuntimeError):
        runs[0].send(mail.s(1))


@pytest.mark.parametrize("way", ["delay_on_commit", "apply_async_on_commit"])
def test_g13_on_commit_of_a_locked_task_is_recorded_in_an_atomic_body(app, mail, way):
    def body(self, order):
        if way == "delay_on_commit":
            mail.delay_on_commit(order)
        else:
            mail.apply_async_on_commit((order,), countdown=0)
        return len(pending())

    sent = recorded(app, body).delay(1)
    work(app)
    assert sent.result == 1
    assert [message.payload[0] for message in messages(app)] == [[1]]


def test_on_commit_elsewhere_is_celerys_own(app, mail):
    def body(self, order):
        with transaction.atomic():
            mail.delay_on_commit(order)
            assert waiting(app) is None
        return len(messages(app))

    sent = task(app, body).delay(1)
    work(app)
    assert sent.result == 1
    assert FollowUp.objects.count() == 0


def test_an_eager_run_sends_when_its_callers_transaction_is_committed(app, mail):
    made = sending(app, mail)
    with transaction.atomic():
        made.apply((1,))
        assert waiting(app) is None
    assert len(messages(app)) == 1
    assert pending() == []


# -- retention -----------------------------------------------------------------------------


def left_pending(app: Celery, mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(follow_ups.FollowUps, "publish", lambda self: None)
        sending(app, mail).delay(1)
        work(app)


@pytest.mark.usefixtures("current")
def test_g13_neither_purge_nor_forget_deletes_pending_follow_ups(app, mail, monkeypatch):
    left_pending(app, mail, monkeypatch)
    record = IdempotencyRecord.objects.get()
    past = database_time.Now() - record.expires_at.resolution
    IdempotencyRecord.objects.update(expires_at=past)
    FollowUp.objects.update(expires_at=past)
    assert list(retention.purge()) == [1]
    assert len(pending()) == 1
    left_pending(app, mail, monkeypatch)
    record = IdempotencyRecord.objects.get()
    assert not IdempotencyRecord.objects.forget(record.scope, record.key)
    assert len(pending()) == 2
    call_command("publish_pending_followups", older_than=0, verbosity=0, stdout=io.StringIO())
    FollowUp.objects.update(expires_at=past)
    list(retention.purge())
    assert FollowUp.objects.count() == 0


def test_a_published_follow_up_keeps_no_arguments(app, mail):
    sending(app, mail).delay(1)
    work(app)
    follow_up = FollowUp.objects.get()
    assert follow_up.published_at is not None
    assert follow_up.message == ""
    assert work(app).payload[0] == [1]


@pytest.mark.usefixtures("current")
def test_a_record_may_be_forgotten_while_its_follow_ups_are_published(app, mail, monkeypatch):
    """What the broker has got is sent, the rest is not, and no row comes back."""

    def body(self, order):
        for number in range(3):
            self.current_run.send(mail.s(number))

    with monkeypatch.context() as patched:
        patched.setattr(follow_ups.FollowUps, "publish", lambda self: None)
        recorded(app, body).delay(1)
        work(app)
    record = IdempotencyRecord.objects.get()
    publish = Celery.send_task

    def forget_and_publish(*args: Any, **options: Any) -> Any:
        IdempotencyRecord.objects.forget(record.scope, record.key, force=True)
        return publish(*args, **options)

    monkeypatch.setattr(Celery, "send_task", forget_and_publish)
    monkeypatch.setattr(app, "send_task", forget_and_publish.__get__(app), raising=False)
    call_command("publish_pending_followups", older_than=0, verbosity=0, stdout=io.StringIO())
    assert [message.payload[0] for message in messages(app)] == [[0]]
    assert not FollowUp.objects.exists()


@pytest.mark.usefixtures("current")
def test_g13_the_command_publishes_pending_follow_ups(app, mail, monkeypatch):
    left_pending(app, mail, monkeypatch)
    (task_id,) = pending()

    def publish(**options: Any) -> dict[str, int]:
        out = io.StringIO()
        call_command("publish_pending_followups", format="json", stdout=out, **options)
        found: dict[str, int] = json.loads(out.getvalue())
        return found

    # A worker may publish it soon.
    assert publish() == {"published": 0, "pending": 1}
    assert publish(older_than=0) == {"published": 1, "pending": 0}
    assert [message.headers["id"] for message in messages(app)] == [task_id]


@pytest.mark.usefixtures("current", "broken")
def test_the_command_fails_without_a_broker(app, mail, monkeypatch):
    left_pending(app, mail, monkeypatch)
    with pytest.raises(CommandError, match="away"):
        call_command("publish_pending_followups", older_than=0)
    assert len(pending()) == 1


@pytest.mark.parametrize("wrong", [{"using": "nowhere"}, {"older_than": -1}])
def test_the_command_refuses_impossible_options(wrong):
    with pytest.raises(CommandError) as caught:
        call_command("publish_pending_followups", **wrong)
    assert caught.value.returncode == 2


# -- a task that replaces itself -----------------------------------------------------------


def stepping(app: Celery, **options: Any) -> Any:
    """Works in three steps; each replaces the one before."""

    def body(self, order, step=0):
        Effect.objects.create(order_number=order, by=f"step {step}")
        if step < 2:
            raise self.replace(self.si(order, step + 1))
        return f"done in step {step}"

    return recorded(app, body, **options)


def steps() -> list[str]:
    return sorted(Effect.objects.values_list("by", flat=True))


ALL = ["step 0", "step 1", "step 2"]
PAYLOADS = pytest.mark.parametrize("payload", [None, ["order"]])
ATOMIC = pytest.mark.parametrize("atomic", [True, False])


@ATOMIC
@PAYLOADS
def test_g12_a_task_that_replaces_itself_runs_each_step_once(app, payload, atomic):
    made = stepping(app, idempotency_payload=payload, atomic=atomic)
    sent = made.delay(1)
    original = work(app)
    for _ in range(2):
        # The broker delivers the original again, before and after the next step.
        republish(app, original)
        work(app)
        work(app)
    republish(app, original)
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", "done in step 2")
    assert (steps(), states(), waiting(app)) == (ALL, ["succeeded"], None)
    again = made.delay(1)
    work(app)
    assert (again.result, steps()) == ("done in step 2", ALL)


def republish(app: Celery, message: Any) -> None:
    """Make the broker deliver a message again."""
    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection)
        producer.publish(
            message.payload,
            routing_key=app.conf.task_default_queue,
            serializer="json",
            headers=message.headers,
            correlation_id=message.properties["correlation_id"],
        )


@PAYLOADS
def test_g13_a_replacement_that_was_not_published_is_published_by_the_redelivery(
    app, payload, monkeypatch
):
    made = stepping(app, idempotency_payload=payload)
    sent = made.delay(1)
    with monkeypatch.context() as patched:
        patched.setattr(follow_ups.FollowUps, "publish", lambda self: None)
        original = work(app)
    assert (waiting(app), steps()) == (None, ["step 0"])
    republish(app, original)
    work(app)
    assert (sent.state, pending()) == ("PENDING", [])
    work(app)
    work(app)
    assert (sent.result, steps()) == ("done in step 2", ALL)


def test_g12_a_replacement_whose_run_is_rolled_back_is_never_sent(app, monkeypatch):
    made = stepping(app)
    made.delay(1)
    real = idempotency.complete

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError("dies here")

    monkeypatch.setattr(idempotency, "complete", fail)
    original = work(app)
    assert (waiting(app), steps(), FollowUp.objects.count()) == (None, [], 0)
    monkeypatch.setattr(idempotency, "complete", real)
    republish(app, original)
    for _ in range(3):
        work(app)
    assert steps() == ALL


def test_g12_no_other_run_begins_while_a_replacement_is_pending(app):
    made = stepping(app, idempotency_payload=["order"])
    sent = made.delay(1)
    work(app)
    step_1 = waiting(app)
    IdempotencyRecord.objects.update(state="running", owner="died", step=1)
    other = made.delay(1)
    work(app)
    assert other.state == "RETRY"
    IdempotencyRecord.objects.update(state="failed")
    work(app)
    assert other.state == "FAILURE"
    assert "forget the record" in str(other.result)
    IdempotencyRecord.objects.update(state="waiting")
    republish(app, step_1)
    work(app)
    work(app)
    assert (sent.state, steps()) == ("SUCCESS", ALL)


@pytest.mark.parametrize("shape", ["chain", "in a chain"])
def test_a_task_may_be_replaced_by_a_canvas_and_in_one(app, mail, shape):
    def body(self, order):
        raise self.replace(chain(mail.si(2), mail.si(3)) if shape == "chain" else mail.si(2))

    made = recorded(app, body)
    canvas = made.si(1) if shape == "chain" else chain(made.si(1), mail.si(3))
    sent = canvas.delay()
    republish(app, work(app))
    while sent.state == "PENDING":
        work(app)
    assert sent.result == 3
    assert waiting(app) is None
    assert list(Effect.objects.values_list("order_number", flat=True)) == [2, 3]


def test_a_replacement_that_is_not_json_is_published_at_once(app, mail):
    app.conf.accept_content = ["json", "pickle"]

    def text(self, order):
        return str(order)

    strange = task(app, text, serializer="pickle", lock_key=None)

    def body(self, order):
        raise self.replace(strange.si(frozenset([order])))

    made = recorded(app, body, serializer="pickle")
    sent = made.delay(1)
    for _ in range(2):
        message = waiting(app)
        message.accept = {"application/x-python-serialize"}
        Request(
            message, app=app, task=app.tasks[message.headers["task"]], on_ack=lambda *_: None
        ).execute()
    assert sent.result == "frozenset({1})"
    assert IdempotencyRecord.objects.get().ending == "replaced"


def test_ignore_is_distinguished_from_a_replacement(app):
    def body(self, order):
        raise Ignore

    recorded(app, body).delay(1)
    work(app)
    assert IdempotencyRecord.objects.get().ending == "ignored"


def test_the_step_of_a_replacement_survives_being_requeued(app):
    made = stepping(app)
    sent = made.delay(1)
    work(app)
    with held("order:1"):
        work(app)
    step_1 = waiting(app)
    assert step_1.headers["replaced_task_nesting"] == 1
    assert step_1.headers[requeue.HEADER]["count"] == 1
    republish(app, step_1)
    work(app)
    work(app)
    assert (sent.state, steps()) == ("SUCCESS", ALL)
