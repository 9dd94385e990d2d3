"""Runs that are interrupted, redelivered, or that end in an unusual way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.worker.request import Request
from django.db import connection, connections

from django_dlock import Lock, locks
from django_dlock.celery.delivery.interrupt import BodyRunner, LeaseAborted
from django_dlock.celery.publishing import requeue
from django_dlock.exceptions import AttemptsExhausted, LeaseLost
from django_dlock.models import IdempotencyRecord
from django_dlock.records import idempotency
from testproject.shop.models import Effect
from tests.support.deliveries import (
    effects,
    held,
    in_memory,
    recorded,
    states,
    task,
    waiting,
    work,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def lose(lock: Lock) -> None:
    """Break the lock under its holder, and let the holder notice."""
    assert locks["default"].break_(lock.name, owner=lock.owner)
    with pytest.raises(LeaseLost):
        lock.renew()


# -- the same message delivered again ------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_g12_a_redelivered_task_is_no_duplicate_of_itself(app, policy):
    """It was killed after COMMIT but before its result was stored, so no caller has the result."""
    made = recorded(app, if_duplicate=policy)
    sent = made.delay(1)
    work(app)
    app.backend.forget(sent.id)
    made.apply_async((1,), task_id=sent.id)
    work(app)
    assert (sent.state, sent.result, effects()) == ("SUCCESS", 1, 1)


@pytest.mark.parametrize("policy", ["skip", "fail", "wait"])
def test_g13_a_holder_that_vanishes_before_it_is_read_may_be_the_same_message(
    app, policy, monkeypatch
):
    """The lease of a dead original ends between the attempt and the question who holds it."""
    made = task(app, if_contended=policy, lock_wait=0)
    with held("order:1"):
        sent = made.delay(1)
        monkeypatch.setattr(type(locks["default"]), "get", lambda *args: None)
        work(app)
    assert sent.state == "RETRY"
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)


@pytest.mark.parametrize("policy", ["requeue", "skip", "fail", "wait"])
def test_g13_a_copy_is_requeued_for_as_long_as_its_original_runs(app, policy):
    """The broker delivers again after its visibility timeout, whatever ``contention_timeout``."""
    made = task(app, if_contended=policy, lock_wait=0, contention_timeout=0)
    sent = made.delay(1)
    original = Lock("order:1", bound=False, metadata={"task_id": sent.id})
    original.acquire()
    for _ in range(3):
        work(app)
        assert sent.state == "RETRY"
    original.release()
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)


def test_g12_a_redelivered_task_that_was_replaced_stores_no_result(app):
    """Both have the same id. If the original stored a result, it would count as the replacement's
    and be passed down the chain."""

    def body(self, order):
        raise Ignore

    made = recorded(app, body)
    sent = made.delay(1)
    work(app)
    made.apply_async((1,), task_id=sent.id)
    work(app)
    assert sent.state == "PENDING"
    assert made.apply((1,)).get() is None
    assert states() == ["succeeded"]


def test_wait_does_not_claim_to_have_waited_for_a_record(app):
    """Only the record knows the other run, and nobody can wait for a record."""
    nested = []

    def body(self, order, name):
        if not nested:
            nested.append(made.delay(order, "other"))
            work(app)
        return order

    made = recorded(
        app,
        body,
        lock_key="{name}",
        idempotency_payload=["order"],
        atomic=False,
        if_contended="wait",
    )
    made.delay(1, "one")
    work(app)
    assert nested[0].state == "RETRY"
    work(app)
    assert nested[0].state == "SUCCESS"


# -- interrupted bodies --------------------------------------------------------------------


@pytest.mark.parametrize("atomic", [True, False])
def test_g13_a_run_that_swallowed_its_interruption_does_not_succeed(app, atomic):
    """The interrupted part is missing, and a record with ``succeeded`` is final."""
    runs = []

    def body(self, order):
        runs.append(self.current_run)
        try:
            if len(runs) == 1:
                lose(runs[0].lock)
                while True:
                    pass
            Effect.objects.create(order_number=order, by=self.name[:40])
        except Exception:
            pass
        return order

    sent = recorded(app, body, atomic=atomic).delay(1)
    work(app)
    assert (sent.state, effects(), states()) == ("RETRY", 0, ["waiting"])
    work(app)
    assert (sent.state, effects(), states()) == ("SUCCESS", 1, ["succeeded"])


def test_a_lock_only_body_that_swallowed_its_interruption_runs_again(app):
    runs = []

    def body(self, order):
        runs.append(self.current_run)
        if len(runs) == 1:
            lose(runs[0].lock)
            try:
                while True:
                    pass
            except LeaseLost:
                return None
        return order

    sent = task(app, body).delay(1)
    work(app)
    assert sent.state == "RETRY"
    work(app)
    assert sent.result == 1


def test_g13_a_nested_eager_task_does_not_record_the_interruption_of_its_caller(app):
    def nested(self, order):
        Effect.objects.create(order_number=order, by="nested")
        raise LeaseAborted

    made = recorded(app, nested, if_lost="finish")
    made.apply((1,))
    assert (effects(), states()) == (0, ["failed"])


def outlasting(runs: list[str]) -> Any:
    def body(self, order):
        runs.append(self.request.id)
        never = threading.Event()
        while not never.wait(0.001):
            pass

    return body


def test_a_body_that_always_exceeds_max_hold_fails_for_good(app):
    """Without a record, too: nothing else would ever end it."""
    runs: list[str] = []
    sent = task(app, outlasting(runs), lock_max_hold=0.5, max_attempts=2).delay(1)
    work(app)
    assert sent.state == "RETRY"
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)
    assert waiting(app) is None
    assert len(runs) == 2


def test_contention_between_two_runs_keeps_the_count_of_runs_ended_by_max_hold(app):
    sent = task(app, outlasting([]), lock_max_hold=0.5, max_attempts=2).delay(1)
    work(app)
    with held("order:1"):
        work(app)
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)


@pytest.mark.parametrize("error", [LeaseAborted, SoftTimeLimitExceeded])
def test_nothing_is_interrupted_after_a_body_whose_very_end_was_interrupted(error):
    """A signal may come at any function's entry, also in the one that ends the interruptions."""

    class Interrupted(BodyRunner):
        struck_once = False

        def _close(self) -> None:
            if not self.struck_once:
                self.struck_once = True
                raise error
            super()._close()

    guard = Interrupted()
    if error is LeaseAborted:
        assert guard.run(lambda: "done") == "done"
    else:
        with pytest.raises(SoftTimeLimitExceeded):
            guard.run(lambda: "done")
    assert guard._closing
    assert guard._ended.is_set()
    guard.interrupt(None, "broken")
    assert not guard._interrupt_once()


# -- errors that cannot be recorded ----------------------------------------------------


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Raw(Exception):
    def __repr__(self) -> str:
        return str(self)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Without the test's log, because pytest-xdist cannot send a lone surrogate."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize(
    "error",
    [Raw("\x00"), Raw("\ud800"), Unprintable(), ValueError("x" * 2_000_000)],
    ids=["nul", "surrogate", "unprintable", "huge"],
)
def test_g13_any_exception_of_a_body_can_be_recorded(app, error):
    def body(self, order):
        raise error

    recorded(app, body).delay(1)
    work(app)
    row = IdempotencyRecord.objects.get()
    assert row.state == "failed"
    assert "\x00" not in row.error
    assert len(row.error) < 20_000


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("reason", ["\ud800", Unprintable()], ids=["surrogate", "unprintable"])
def test_g13_a_reject_whose_reason_cannot_be_recorded_stays_a_reject(app, reason):
    def body(self, order):
        raise Reject(reason, requeue=True)

    made = recorded(app, body)
    made.delay(1)
    outcome = Request(waiting(app), app=app, task=made, on_reject=lambda *_: None).execute()
    assert isinstance(outcome.exception.exc, Reject)
    assert states() == ["waiting"]


def test_g13_a_message_is_returned_though_the_publishers_error_cannot_be_pickled(app, monkeypatch):
    """If a child could not send its Reject to the parent, it would be acknowledged as failed."""
    import pickle

    monkeypatch.setattr(requeue, "REJECT_PAUSE", 0)

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(threading.Lock())

    made = task(app)
    with held("order:1"):
        made.delay(1)
        message = waiting(app)
        monkeypatch.setattr(app, "send_task", refuse)
        outcome = Request(message, app=app, task=made, on_reject=lambda *_: None).execute()
    assert pickle.loads(pickle.dumps(outcome.exception.exc)).requeue


# -- connections ---------------------------------------------------------------------------


def test_a_claim_that_is_interrupted_leaves_the_connection_usable(app, monkeypatch):
    def torn(*args: Any, **options: Any) -> Any:
        # An error between two lines of ``Atomic.__enter__``.
        connection.set_autocommit(False)
        connection.in_atomic_block = True
        raise SoftTimeLimitExceeded

    real = idempotency.claim
    monkeypatch.setattr(idempotency, "claim", torn)
    made = recorded(app)
    sent = made.delay(1)
    work(app)
    assert isinstance(sent.result, SoftTimeLimitExceeded)
    assert not connections["default"].in_atomic_block
    monkeypatch.setattr(idempotency, "claim", real)
    sent = made.delay(1)
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)


def test_a_soft_limit_just_after_the_acquire_releases_the_lock(app, monkeypatch):
    """Otherwise the error's frames keep its handle alive, and it is renewed until collected."""
    real = Lock.acquire

    def acquire(self: Lock, *args: Any, **options: Any) -> bool:
        real(self, *args, **options)
        raise SoftTimeLimitExceeded

    made = task(app)
    with monkeypatch.context() as patched:
        patched.setattr(Lock, "acquire", acquire)
        sent = made.delay(1)
        work(app)
    assert isinstance(sent.result, SoftTimeLimitExceeded)
    assert locks["default"].get("order:1") is None
