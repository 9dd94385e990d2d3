"""Deliveries as a worker makes them, in this process: a broker in memory, locks on ``local``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request
from django.db import InterfaceError, OperationalError, connection, connections, transaction
from django.test import override_settings

from django_dlock import Lock, LockedTask, events, idempotency, locks
from django_dlock.celery import requeue
from django_dlock.exceptions import (
    AcquireTimeout,
    AlreadyHeld,
    BackendUnavailable,
    DuplicateRun,
    LeaseLost,
    LockNotAcquired,
    PayloadMismatch,
)
from django_dlock.lock_options import DEFAULT
from django_dlock.models import IdempotencyRecord
from testproject.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

numbers = itertools.count()


@pytest.fixture
def app() -> Celery:
    app = Celery("deliveries", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = f"deliveries-{next(numbers)}"
    return app


@pytest.fixture(autouse=True)
def local_locks() -> Iterator[None]:
    """The default alias, in memory and new for every test."""
    entry = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
    with override_settings(DLOCKS={"default": entry}):
        yield


def task(app: Celery, function: Any = None, **options: Any) -> Any:
    def body(self, order: int, note: str = "") -> int:
        Effect.objects.create(order_number=order, by=self.name[:40])
        return order

    options = {"lock_key": "order:{order}", "bind": True, "lazy": False, **options}
    name = f"deliveries.t{next(numbers)}"
    return app.task(base=LockedTask, name=name, shared=False, **options)(function or body)


def recorded(app: Celery, function: Any = None, **options: Any) -> Any:
    return task(app, function, **{"idempotency_key": "{order}", "atomic": True, **options})


def waiting(app: Celery) -> Any:
    """The next message of the queue, or ``None``."""
    with app.connection_for_read() as connected:
        queue = app.amqp.queues[app.conf.task_default_queue](connected.default_channel)
        return queue.get(no_ack=True)


def work(app: Celery) -> Any:
    """Deliver the next message to a worker's own code; the message."""
    message = waiting(app)
    assert message is not None
    made = app.tasks[message.headers["task"]]
    Request(message, app=app, task=made, on_ack=lambda *_: None).execute()
    return message


@contextmanager
def held(name: str) -> Iterator[None]:
    """Held by somebody else."""
    lock = Lock(name, bound=False)
    assert lock.acquire(blocking=False)
    yield
    lock.release()


def effects() -> int:
    return Effect.objects.count()


def states() -> list[str]:
    return list(IdempotencyRecord.objects.values_list("state", flat=True))


# -- contention ----------------------------------------------------------------------------


def test_g13_a_contended_task_is_published_again_as_it_was(app):
    made = task(app)
    other = made.si(7)
    with held("order:1"):
        sent = made.apply_async(
            (1,),
            {"note": "n"},
            link=other,
            link_error=other,
            chain=[other],
            chord=other,
            group_id="g",
            group_index=3,
            expires=3600,
            priority=4,
            retries=2,
            time_limit=90,
            soft_time_limit=80,
            shadow="shown",
            headers={"mine": "kept"},
            argsrepr="(hidden)",
            reply_to="there",
            root_id="root",
            parent_id="parent",
            stamped_headers=["stamp"],
            stamp="s",
        )
        before = work(app)
    after = waiting(app)
    assert sent.state == "RETRY"
    changed = {
        key
        for key in before.headers.keys() | after.headers.keys()
        if before.headers.get(key) != after.headers.get(key)
    }
    assert changed == {"eta", requeue.HEADER}
    assert after.payload == before.payload
    for name in ("correlation_id", "reply_to", "priority", "delivery_mode"):
        assert after.properties.get(name) == before.properties.get(name)
    assert after.delivery_info["routing_key"] == before.delivery_info["routing_key"]
    assert effects() == 0


def test_a_requeue_without_a_parent_does_not_become_its_own_child(app):
    made = task(app)
    with held("order:1"):
        made.delay(1)
        work(app)
    assert waiting(app).headers["parent_id"] is None


def test_a_requeue_goes_back_to_the_queue_it_came_from(app):
    made = task(app)
    home, app.conf.task_default_queue = app.conf.task_default_queue, "elsewhere"
    with held("order:1"):
        made.apply_async((1,), queue=home)
        app.conf.task_default_queue = home
        work(app)
    assert waiting(app).delivery_info["routing_key"] == home


def test_the_first_requeue_is_timed_by_the_backends_clock_and_kept(app):
    made = task(app)
    with held("order:1"):
        made.delay(1)
        work(app)
        first = work(app).headers[requeue.HEADER]
        second = waiting(app).headers[requeue.HEADER]
    assert first["since"] == second["since"] > 1_600_000_000
    assert (first["count"], second["count"]) == (1, 2)


def test_a_requeue_ends_with_the_contention_timeout(app):
    made = task(app, contention_timeout=0)
    with held("order:1"):
        sent = made.delay(1)
        work(app)
    assert isinstance(sent.result, LockNotAcquired)
    assert sent.state == "FAILURE"


def test_the_trail_ends_where_the_body_begins(app):
    """A retry that meets contention counts from there, not from before its first run."""

    def body(self, order):
        raise self.retry(countdown=0)

    made = task(app, body)
    with held("order:1"):
        made.delay(1)
        work(app)
    work(app)
    assert requeue.HEADER not in waiting(app).headers


def test_delays_grow_with_jitter_up_to_a_quarter_of_the_visibility_timeout(app):
    made = task(app)
    delays = [[requeue._delay(made, count) for _ in range(50)] for count in (0, 1, 5, 100)]
    assert all(0.25 <= delay <= 0.5 for delay in delays[0])
    assert all(0.5 <= delay <= 1 for delay in delays[1])
    assert all(30 <= delay <= 60 for delay in delays[3])
    assert len(set(delays[0])) > 1
    app.conf.broker_transport_options = {"visibility_timeout": 20}
    assert requeue._delay(made, 100) <= 5


def test_g13_a_message_that_cannot_be_published_goes_back(app, monkeypatch):
    made = task(app)
    monkeypatch.setattr(requeue, "REJECT_PAUSE", 0)

    def refuse(*args, **options):
        raise OSError("broker down")

    with held("order:1"):
        made.delay(1)
        message = waiting(app)
        monkeypatch.setattr(app, "send_task", refuse)
        outcome = Request(message, app=app, task=made, on_reject=lambda *_: None).execute()
    assert isinstance(outcome.exception.exc, Reject)
    assert outcome.exception.exc.requeue
    assert effects() == 0


def test_skip_ends_as_a_success_without_a_result(app):
    made = task(app, if_contended="skip")
    with held("order:1"):
        sent = made.delay(1)
        work(app)
    assert (sent.state, sent.result) == ("SUCCESS", None)
    assert waiting(app) is None


def test_fail_ends_as_a_failure(app):
    made = task(app, if_contended="fail")
    with held("order:1"):
        sent = made.delay(1)
        work(app)
    assert isinstance(sent.result, LockNotAcquired)


@pytest.mark.parametrize("policy", ["skip", "fail", "wait"])
def test_g13_a_copy_of_the_running_task_itself_is_requeued_whatever_the_policy(app, policy):
    """Skipping it would lose the task, if the holder is its dead original."""
    made = task(app, if_contended=policy, lock_wait=0)
    sent = made.delay(1)
    with_id = Lock("order:1", bound=False, metadata={"task_id": sent.id})
    with_id.acquire()
    work(app)
    with_id.release()
    assert sent.state == "RETRY"
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)


def test_wait_gives_up_after_lock_wait(app):
    made = task(app, if_contended="wait", lock_wait=0.05)
    with held("order:1"):
        sent = made.delay(1)
        work(app)
    assert isinstance(sent.result, AcquireTimeout)


# -- outages -------------------------------------------------------------------------------


@pytest.fixture
def no_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def acquire(*args: Any, **options: Any) -> Any:
        raise BackendUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(type(locks["default"]), "acquire", acquire)
        yield


def test_g13_a_task_is_put_back_while_the_backend_is_away(app, no_backend):
    sent = task(app).delay(1)
    work(app)
    assert sent.state == "RETRY"
    assert waiting(app) is not None


def test_if_unavailable_may_fail_or_skip(app, no_backend):
    failed, skipped = task(app, if_unavailable="fail"), task(app, if_unavailable="skip")
    sent = failed.delay(1), skipped.delay(1)
    work(app), work(app)
    assert isinstance(sent[0].result, BackendUnavailable)
    assert (sent[1].state, sent[1].result) == ("SUCCESS", None)
    assert effects() == 0


def test_if_unavailable_local_excludes_within_the_process_and_says_so(app, monkeypatch, caplog):
    from django_dlock.backends.local import LocalBackend

    nested = []
    real = LocalBackend.acquire

    def acquire(self: LocalBackend, request: Any, *, deadline: float) -> Any:
        if self.alias == "default":
            raise BackendUnavailable("no answer")
        return real(self, request, deadline=deadline)

    def body(self, order):
        if not nested:
            nested.append(True)
            made.delay(order)
            work(app)
            nested.append(waiting(app) is not None)
        return order

    made = task(app, body, if_unavailable="local")
    monkeypatch.setattr(LocalBackend, "acquire", acquire)
    sent = made.delay(1)
    work(app)
    assert sent.state == "SUCCESS"
    assert nested == [True, True]
    assert "in this process alone" in caplog.text


@pytest.mark.parametrize("kind", [OperationalError, InterfaceError])
@pytest.mark.parametrize("place", ["claim", "complete"])
def test_g13_a_task_is_put_back_while_the_database_is_away(app, monkeypatch, kind, place):
    real = getattr(idempotency, place)

    def fail(*args: Any, **options: Any) -> Any:
        raise kind("gone")

    monkeypatch.setattr(idempotency, place, fail)
    sent = recorded(app).delay(1)
    work(app)
    assert (sent.state, effects()) == ("RETRY", 0)
    monkeypatch.setattr(idempotency, place, real)
    work(app)
    assert (sent.state, sent.result, effects()) == ("SUCCESS", 1, 1)


def test_g13_a_failure_that_cannot_be_recorded_is_not_final(app, monkeypatch):
    """The body failed of the same outage, most likely."""

    def body(self, order):
        raise OperationalError("gone")

    def fail(*args: Any, **options: Any) -> Any:
        raise OperationalError("still gone")

    monkeypatch.setattr(idempotency, "fail", fail)
    sent = recorded(app, body).delay(1)
    work(app)
    assert sent.state == "RETRY"


# -- the record ----------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_g12_an_error_out_of_commit_is_settled_by_reading_the_attempt(app, monkeypatch, committed):
    real = type(connections["default"])._commit
    errors = [OperationalError("the answer to COMMIT was lost")]

    def commit(self: Any) -> None:
        # Only of the body's transaction, in which the effect stands.
        if errors and effects():
            if committed:
                real(self)
            raise errors.pop()
        real(self)

    monkeypatch.setattr(type(connections["default"]), "_commit", commit)
    sent = recorded(app).delay(1)
    work(app)
    if committed:
        assert (sent.state, sent.result) == ("SUCCESS", 1)
        assert waiting(app) is None
    else:
        assert (sent.state, effects(), states()) == ("RETRY", 0, ["waiting"])
        work(app)
        assert sent.state == "SUCCESS"
    assert (effects(), states()) == (1, ["succeeded"])


def test_an_on_commit_function_that_raises_does_not_undo_the_success(app, caplog):
    def body(self, order):
        transaction.on_commit(lambda: 1 // 0)
        return order

    sent = recorded(app, body).delay(1)
    work(app)
    assert (sent.state, states()) == ("SUCCESS", ["succeeded"])
    assert "ZeroDivisionError" in caplog.text


def test_if_duplicate_may_skip_or_fail(app):
    for policy in ("skip", "fail"):
        made = recorded(app, if_duplicate=policy)
        sent = [made.delay(1), made.delay(1)]
        work(app), work(app)
        assert sent[0].result == 1
        if policy == "skip":
            assert (sent[1].state, sent[1].result) == ("SUCCESS", None)
        else:
            assert isinstance(sent[1].result, DuplicateRun)
    assert effects() == 2


def test_a_result_need_not_be_stored(app):
    def body(self, order):
        return [order]

    made = recorded(app, body, store_result=False)
    sent = [made.delay(1), made.delay(1)]
    work(app), work(app)
    assert [each.result for each in sent] == [[1], None]


def test_g14_the_same_key_with_another_payload_fails_and_is_not_skipped(app):
    made = recorded(app)
    sent = [made.delay(1, note="a"), made.delay(1, note="b")]
    work(app), work(app)
    assert isinstance(sent[1].result, PayloadMismatch)
    assert effects() == 1


def test_g13_a_run_under_another_lock_is_met_as_contention(app):
    """Two names for one key: only the record knows that they are the same work."""
    outer = []

    def body(self, order, name):
        if not outer:
            outer.append(made.delay(order, "other"))
            work(app)
        return order

    made = recorded(app, body, lock_key="{name}", idempotency_payload=["order"], atomic=False)
    sent = made.delay(1, "one")
    work(app)
    assert (sent.state, outer[0].state) == ("SUCCESS", "RETRY")
    work(app)
    assert outer[0].state == "SUCCESS"
    assert IdempotencyRecord.objects.get().attempt == 1


def test_g13_a_stopping_worker_leaves_the_key_takeable(app):
    def body(self, order):
        raise SystemExit

    made = recorded(app, body)
    made.delay(1)
    with pytest.raises(SystemExit):
        work(app)
    assert states() == ["waiting"]
    assert locks["default"].get("order:1") is None


def test_g15_the_record_is_committed_before_the_lock_is_released(app, monkeypatch):
    from django_dlock.backends.local import LocalBackend

    seen = []
    real = LocalBackend.release

    def release(self: LocalBackend, *args: Any, **options: Any) -> Any:
        seen.append((connection.in_atomic_block, effects(), states()))
        return real(self, *args, **options)

    monkeypatch.setattr(LocalBackend, "release", release)
    recorded(app).delay(1)
    work(app)
    assert seen == [(False, 1, ["succeeded"])]


def test_a_body_knows_its_lock_its_key_and_its_attempt(app):
    def body(self, order):
        run = self.current_run
        return [run.lock.name, run.lock.held, run.scope, run.key, run.attempt]

    made = recorded(app, body, idempotency_scope="charges")
    sent = made.delay(1)
    work(app)
    assert sent.result == ["order:1", True, "charges", "1", 1]
    assert made.current_run is None


def test_g12_a_loss_during_commit_strikes_nobody(app, monkeypatch):
    """The exception that stops bodies can land anywhere; not here."""
    runs, untouched = [], []
    real = type(connections["default"])._commit

    def body(self, order):
        runs.append(self.current_run)
        Effect.objects.create(order_number=order, by=self.name[:40])
        return order

    def commit(self: Any) -> None:
        if effects() and runs[0].lock.held:
            lock = runs[0].lock
            assert locks["default"].break_(lock.name, owner=lock.owner)
            with pytest.raises(LeaseLost):
                lock.renew()
            # ``on_lost`` comes first; the row about the loss waits for this transaction.
            events.flush(0.3)
            # Enough bytecode for an exception to land in.
            for _ in range(20):
                time.sleep(0.01)
            untouched.append(True)
        real(self)

    monkeypatch.setattr(type(connections["default"]), "_commit", commit)
    sent = recorded(app, body).delay(1)
    work(app)
    assert (untouched, runs[0].lock.lost_reason) == ([True], "broken")
    assert (sent.state, sent.result, effects(), states()) == ("SUCCESS", 1, 1, ["succeeded"])


def test_max_hold_is_the_hard_time_limit_unless_it_is_set(app):
    held_for = []

    def body(self, order):
        held_for.append(self.current_run.lock._options.max_hold)

    task(app, body, time_limit=50).delay(1)
    task(app, body).apply_async((1,), time_limit=40)
    task(app, body, time_limit=50, lock_max_hold=30).delay(1)
    task(app, body).delay(1)
    for _ in range(4):
        work(app)
    assert held_for == [50, 40, 30, locks["default"].options.max_hold]


# -- direct calls and eager mode -----------------------------------------------------------


def test_a_direct_call_takes_no_lock(app):
    made = task(app)
    with held("order:1"):
        assert made(1) == 1


def test_a_body_that_calls_its_own_task_takes_no_second_lock(app):
    def body(self, order, nested=False):
        return "nested" if nested else self(order, nested=True)

    sent = task(app, body).delay(1)
    work(app)
    assert sent.result == "nested"


def test_apply_takes_the_lock_and_waits_for_it(app):
    made = task(app, lock_wait=0.05)
    assert made.apply((1,)).get() == 1
    with held("order:1"):
        assert isinstance(made.apply((1,)).result, AcquireTimeout)


def test_apply_inside_the_lock_of_the_same_thread_does_not_wait_for_ever(app):
    made = task(app, lock_wait=None)
    with Lock("order:1"):
        assert isinstance(made.apply((1,)).result, AlreadyHeld)


def test_g12_eager_duplicates_return_the_recorded_result(app):
    made = recorded(app)
    assert [made.apply((1,)).get(), made.apply((1,)).get()] == [1, 1]
    assert effects() == 1


def test_g15_an_eager_task_holds_its_lock_until_the_callers_transaction_ends(app):
    made = task(app)
    with transaction.atomic():
        made.apply((1,))
        assert locks["default"].get("order:1") is not None
    assert locks["default"].get("order:1") is None


def test_an_eager_task_in_a_test_case_does_not_hold_its_lock_for_the_whole_test(app):
    """``TestCase`` runs every test in a transaction that never commits."""
    made = task(app, lock_wait=0.05)
    block = transaction.atomic()
    block._from_testcase = True
    with block:
        assert [made.apply((1,)).get(), made.apply((1,)).get()] == [1, 1]


def test_an_eager_failure_inside_a_transaction_shows_the_bodys_own_error(app):
    def body(self, order):
        Effect.objects.create(order_number=None, by="x")

    made = recorded(app, body, atomic=False)
    with transaction.atomic():
        failed = made.apply((1,)).result
        transaction.set_rollback(True)
    assert type(failed).__name__ == "IntegrityError"


def test_a_contended_task_is_no_error_in_the_log(app, caplog):
    made = task(app)
    with held("order:1"):
        made.delay(1)
        work(app)
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


def test_ignore_passes_through_the_lock_alone(app):
    def body(self, order):
        raise Ignore

    sent = task(app, body).delay(1)
    work(app)
    assert sent.state == "PENDING"
    assert locks["default"].get("order:1") is None


def test_the_default_of_lock_wait_is_the_aliass():
    assert LockedTask.lock_wait is DEFAULT
