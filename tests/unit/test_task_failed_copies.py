"""A message that is delivered again after its run has failed for good fails again, and runs not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from django_dlock import AttemptsExhausted, IdempotencyConflict, RecordedFailure, locks
from django_dlock.celery.publishing import follow_ups
from django_dlock.celery.publishing.header import HEADER
from django_dlock.models import FollowUp, IdempotencyRecord
from tests.support.deliveries import held, in_memory, recorded, states, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def failing(app: Celery, error: Exception | None = None, make: Any = recorded, **options: Any):
    """A task that fails in its first run, and the list of its runs."""
    ran: list[int] = []

    def body(self: Any, order: int) -> int:
        ran.append(order)
        if len(ran) == 1:
            raise error or ValueError("declined")
        return order

    return make(app, body, **options), ran


def again(app: Celery, made: Any, sent: Any, **options: Any) -> Any:
    """Deliver a copy of the message that the broker flags; its own state of the result."""
    made.apply_async((1,), task_id=sent.id, **options)
    work(app, redelivered=True)
    return app.AsyncResult(sent.id)


@pytest.mark.parametrize(
    "error", [ValueError("declined"), SoftTimeLimitExceeded(), TimeLimitExceeded(3)]
)
@pytest.mark.parametrize("atomic", [True, False])
def test_g12_a_redelivered_copy_of_a_failed_run_does_not_run(app, error, atomic):
    made, ran = failing(app, error, atomic=atomic)
    sent = made.delay(1)
    work(app)
    copy = again(app, made, sent)
    assert (ran, states(), copy.state) == ([1], ["failed"], "FAILURE")
    assert isinstance(copy.result, type(error))
    assert str(copy.result) == str(error)
    assert IdempotencyRecord.objects.get().attempt == 1


def test_g12_a_copy_that_was_requeued_while_the_first_one_ran_does_not_run(app):
    """Requeued by us, it is a new message to the broker, which flags nothing."""
    made, ran = failing(app)
    sent = made.delay(1)
    made.apply_async((1,), task_id=sent.id)
    with held("order:1"):
        work(app, redelivered=True)
    work(app)
    assert (ran, states()) == ([1], ["failed"])
    work(app)
    assert (ran, states(), waiting(app)) == ([1], ["failed"], None)


@pytest.mark.parametrize("who", ["the same id", "another id"])
def test_g13_any_other_delivery_takes_what_failed(app, who):
    made, ran = failing(app)
    sent = made.delay(1)
    work(app)
    made.apply_async((1,), task_id=sent.id if who == "the same id" else None)
    work(app)
    assert (ran, states()) == ([1, 1], ["succeeded"])


def test_g13_a_redelivered_message_of_another_task_takes_what_failed(app):
    made, ran = failing(app)
    made.delay(1)
    work(app)
    made.delay(1)
    work(app, redelivered=True)
    assert (ran, states()) == ([1, 1], ["succeeded"])


def test_g13_a_redelivered_message_that_has_not_run_runs(app):
    made, ran = failing(app)
    sent = made.delay(1)
    work(app, redelivered=True)
    assert (ran, sent.state) == ([1], "FAILURE")


def test_g13_a_retry_of_a_redelivered_message_runs(app):
    ran: list[int] = []

    def body(self: Any, order: int) -> int:
        ran.append(self.request.retries)
        if len(ran) < 3:
            raise self.retry(countdown=0)
        return order

    sent = recorded(app, body).delay(1)
    work(app, redelivered=True)
    work(app, redelivered=True)
    work(app)
    assert (ran, sent.result) == ([0, 1, 2], 1)


@pytest.mark.parametrize("how", ["retry", "autoretry"])
def test_g12_a_copy_of_a_retry_that_was_the_last_one_does_not_run(app, how):
    ran: list[int] = []

    def body(self: Any, order: int) -> None:
        ran.append(self.request.retries)
        if how == "retry":
            raise self.retry(countdown=0, max_retries=1, exc=ValueError("declined"))
        raise ValueError("declined")

    options: dict[str, Any] = {}
    if how == "autoretry":
        options = {
            "autoretry_for": (ValueError,),
            "retry_kwargs": {"max_retries": 1, "countdown": 0},
        }
    made = recorded(app, body, **options)
    sent = made.delay(1)
    work(app)
    work(app)
    assert (ran, states()) == ([0, 1], ["failed"])
    for retries in (0, 1):
        copy = again(app, made, sent, retries=retries)
        assert (ran, states(), str(copy.result)) == ([0, 1], ["failed"], "declined")


def test_g12_a_copy_of_a_task_that_lost_too_often_does_not_run(app):
    ran: list[int] = []

    def body(self: Any, order: int) -> int:
        ran.append(order)
        lock = self.current_run.lock
        assert locks["default"].break_(lock.name, owner=lock.owner)
        lock.renew()
        return order

    made = recorded(app, body, max_attempts=1)
    sent = made.delay(1)
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)
    copy = again(app, made, sent)
    assert (ran, states()) == ([1], ["failed"])
    assert isinstance(copy.result, AttemptsExhausted)


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_g12_a_copy_that_does_not_get_the_lock_has_the_recorded_failure(app, policy):
    made, ran = failing(app, if_contended=policy)
    sent = made.delay(1)
    work(app)
    app.backend.forget(sent.id)
    with held("order:1"):
        copy = again(app, made, sent)
    assert (ran, copy.state) == ([1], "FAILURE")
    assert isinstance(copy.result, RecordedFailure)


@pytest.mark.parametrize("gone", ["forgotten", "ignored"])
def test_a_copy_says_what_is_recorded_if_the_result_is_unknown(app, gone):
    made, ran = failing(app, ignore_result=gone == "ignored")
    type(made).on_failure = lambda self, exc, *args: failed.append(exc)
    failed: list[Exception] = []
    sent = made.delay(1)
    work(app)
    app.backend.forget(sent.id)
    again(app, made, sent)
    assert ran == [1]
    assert isinstance(failed[1], RecordedFailure)
    assert isinstance(failed[1], IdempotencyConflict)
    assert "failed for good: ValueError('declined')" in str(failed[1])
    assert (failed[1].name, failed[1].alias) == ("order:1", "default")


def test_a_copy_tells_the_log_whose_copy_it_is(app, caplog):
    made, _ = failing(app)
    sent = made.delay(1)
    work(app)
    caplog.set_level("INFO", "django_dlock")
    again(app, made, sent)
    (told,) = [line for line in caplog.messages if "is a copy" in line]
    assert sent.id in told
    assert "ValueError('declined')" in told


def test_a_private_task_keeps_and_tells_no_argument_in_its_failure(app, caplog):
    made, ran = failing(app, ValueError("card 4711"), store_arguments=False, ignore_result=True)
    caught: list[Exception] = []
    type(made).on_failure = lambda self, exc, *args: caught.append(exc)
    sent = made.delay(1)
    work(app)
    caplog.clear()
    again(app, made, sent)
    assert ran == [1]
    assert "4711" not in str(caught[1]) + caplog.text
    assert caught[1].__cause__ is None


def test_link_error_of_a_copy_has_the_id_of_the_first_one(app):
    """The first delivery may have died before it told anybody."""

    @app.task(name="deliveries.told", shared=False, lazy=False)
    def told() -> None:
        """Never called."""

    made, _ = failing(app)
    sent = made.apply_async((1,), link_error=told.si())
    work(app)
    first = waiting(app).headers["id"]
    again(app, made, sent, link_error=told.si())
    assert waiting(app).headers["id"] == first


def test_g12_a_copy_of_a_run_that_was_killed_at_its_hard_limit_does_not_run(app):
    """The worker has reported it, and the killed child could not record it."""
    made, ran = failing(app)
    sent = made.delay(1)
    message = waiting(app)
    app.backend.mark_as_failure(sent.id, TimeLimitExceeded(3))
    IdempotencyRecord.objects.bulk_create([killed(made, message.headers["id"])])
    copy = again(app, made, sent)
    assert (ran, states(), copy.state) == ([], ["failed"], "FAILURE")
    assert isinstance(copy.result, TimeLimitExceeded)
    # The record says so from now on.
    app.backend.forget(sent.id)
    assert isinstance(again(app, made, sent).result, RecordedFailure)
    made.delay(1)
    work(app)
    assert len(ran) == 1


@pytest.mark.parametrize("error", [ValueError("from an earlier life"), None])
def test_g13_a_copy_of_a_run_that_was_killed_otherwise_runs(app, error):
    made, ran = failing(app)
    sent = made.delay(1)
    waiting(app)
    if error is not None:
        app.backend.mark_as_failure(sent.id, error)
    IdempotencyRecord.objects.bulk_create([killed(made, sent.id)])
    ran.append(0)
    assert again(app, made, sent).state == "SUCCESS"
    assert (ran, states()) == ([0, 1], ["succeeded"])


def killed(made: Any, task_id: str) -> IdempotencyRecord:
    """The record that a killed child has left behind; nobody holds its lock."""
    from django.utils import timezone

    now = timezone.now()
    return IdempotencyRecord(
        digest=IdempotencyRecord.digest_of(made.name, "1"),
        scope=made.name,
        key="1",
        payload=made.dlock_options.record.payload((1,), {}),
        state="running",
        attempt=1,
        lock_alias="default",
        lock_name="order:1",
        owner="gone",
        task_id=task_id,
        created_at=now,
        started_at=now,
        expires_at=now + made.dlock_options.record.ttl,
    )


def test_g12_a_follow_up_that_is_published_twice_does_not_run_after_it_has_failed(app):
    """Its first message was not confirmed, so another one is published under its id."""
    made, ran = failing(app)

    def body(self: Any, order: int) -> None:
        self.current_run.send(made.s(order))

    recorded(app, body, lock_key="sends:{order}").delay(1)
    work(app)
    assert FollowUp.objects.get().published_at is not None
    first = waiting(app)
    for _ in range(2):
        with app.connection_for_write() as connection:
            app.amqp.Producer(connection).publish(
                first.decode(), routing_key=app.conf.task_default_queue, headers=first.headers
            )
    work(app)
    assert (ran, state_of(made)) == ([1], "failed")
    work(app)
    assert (ran, state_of(made)) == ([1], "failed")
    # Its retries, and whatever else is published under its id, are new messages.
    made.apply_async((1,), task_id=first.headers["id"])
    work(app)
    assert (ran, state_of(made)) == ([1, 1], "succeeded")


def state_of(made: Any) -> str:
    return str(IdempotencyRecord.objects.get(scope=made.name).state)


def test_without_a_record_a_copy_runs_again(app):
    """The lock alone remembers nothing."""
    made, ran = failing(app, make=task)
    sent = made.delay(1)
    work(app)
    again(app, made, sent)
    assert ran == [1, 1]


def test_a_failed_step_of_a_replaced_task_does_not_run_again(app):
    ran = itertools.count()

    def body(self: Any, order: int, step: int = 0) -> None:
        next(ran)
        if step:
            raise ValueError("declined")
        raise self.replace(self.si(order, step=1))

    made = recorded(app, body)
    sent = made.delay(1)
    work(app)
    message = waiting(app)
    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection)
        for _ in range(2):
            producer.publish(
                message.decode(),
                routing_key=app.conf.task_default_queue,
                headers=message.headers,
                **{key: message.properties[key] for key in ("correlation_id", "reply_to")},
            )
    work(app)
    work(app, redelivered=True)
    assert (next(ran), states(), sent.state) == (2, ["failed"], "FAILURE")


def test_a_transport_of_kombu_other_than_redis_marks_no_message_that_it_restores(app):
    """The limit that the page names: nothing tells such a copy from a new message."""
    made, _ = failing(app)
    made.delay(1)
    with app.connection_for_read() as connected:
        queue = app.amqp.queues[app.conf.task_default_queue](connected.default_channel)
        queue.get().requeue()
        restored = queue.get(no_ack=True)
    assert restored.headers["id"]
    assert not restored.delivery_info.get("redelivered")


def deliver(app: Celery, messages: list[Any]) -> None:
    """Deliver messages with one id, which were in the queue before."""
    assert len({message.headers["id"] for message in messages}) == 1
    for message in messages:
        with app.connection_for_write() as connection:
            app.amqp.Producer(connection).publish(
                message.decode(), routing_key=app.conf.task_default_queue, headers=message.headers
            )
        work(app)


def test_a_retry_runs_although_a_copy_of_the_first_message_has_failed(app):
    """The limit that the page names: a retry is a new message."""
    ran: list[int] = []

    def body(self: Any, order: int) -> int:
        ran.append(self.request.retries)
        if len(ran) == 1:
            raise self.retry(countdown=0)
        if len(ran) == 2:
            raise ValueError("declined")
        return order

    made = recorded(app, body)
    sent = made.delay(1)
    work(app)
    retry = waiting(app)
    assert again(app, made, sent).state == "FAILURE"
    deliver(app, [retry])
    assert (ran, states()) == ([0, 0, 1], ["succeeded"])


@pytest.mark.parametrize("until", ["start", "done"])
def test_g12_a_unique_follow_up_that_is_published_twice_is_marked_each_time(app, until):
    """Its reservation is in the same header."""
    made = recorded(app, unique_until=until)

    def body(self: Any, order: int) -> None:
        self.current_run.send(made.s(order))

    recorded(app, body, lock_key="sends:{order}").delay(1)
    with pytest.MonkeyPatch.context() as patched:
        # The process dies after the broker has it, and before the row says so.
        patched.setattr(follow_ups, "_mark", lambda *args, **facts: None)
        work(app)
    follow_ups.publish(app, follow_ups.pending("default"), "default")
    for message in (waiting(app), waiting(app)):
        assert message.headers[HEADER]["outbox"] == 1


@pytest.mark.parametrize("shape", ["one", "a chain", "a group", "a chord", "the rest of a chain"])
def test_g12_a_callback_that_is_sent_twice_does_not_run_after_it_has_failed(app, shape):
    """The first delivery of its parent died after it had sent it."""
    made, ran = failing(app)
    parent = recorded(app, lock_key="parent:{order}")
    link = made.si(1)
    options: dict[str, Any] = {
        "one": {"link": link},
        "a chain": {"link": chain(link, made.si(2))},
        "a group": {"link": group(link)},
        "a chord": {"link": chord([link], made.si(2))},
        "the rest of a chain": {"chain": [link]},
    }[shape]
    sent = parent.apply_async((1,), **options)
    work(app)
    both = [waiting(app)]
    again(app, parent, sent, **options)
    both.append(waiting(app))
    deliver(app, both)
    assert (ran, state_of(made)) == ([1], "failed")


def test_g12_an_errback_that_is_sent_twice_does_not_run_after_it_has_failed(app):
    made, ran = failing(app)
    parent, _ = failing(app, lock_key="parent:{order}")
    sent = parent.apply_async((1,), link_error=made.si(1))
    work(app)
    both = [waiting(app)]
    again(app, parent, sent, link_error=made.si(1))
    both.append(waiting(app))
    deliver(app, both)
    assert (ran, state_of(made)) == ([1], "failed")


def test_g13_a_callback_of_a_new_delivery_runs_after_it_has_failed(app):
    made, ran = failing(app)
    parent = task(app)
    sent = parent.apply_async((1,), link=made.si(1))
    work(app)
    both = [waiting(app)]
    parent.apply_async((1,), link=made.si(1), task_id=sent.id)
    work(app)
    both.append(waiting(app))
    deliver(app, both)
    assert (ran, state_of(made)) == ([1, 1], "succeeded")


def test_g12_a_canvas_as_replacement_that_is_published_twice_does_not_run_after_failure(app):
    made, ran = failing(app)

    def body(self: Any, order: int) -> None:
        raise self.replace(chain(made.si(1), made.si(2)))

    recorded(app, body, lock_key="replaced:{order}").delay(1)
    with pytest.MonkeyPatch.context() as patched:
        # The process dies after the broker has it, and before the row says so.
        patched.setattr(follow_ups, "_mark", lambda *args, **facts: None)
        work(app)
    follow_ups.publish(app, follow_ups.pending("default"), "default")
    assert work(app).headers["id"] == work(app).headers["id"]
    assert (ran, state_of(made)) == ([1], "failed")
