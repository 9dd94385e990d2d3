"""Runs with a record, the end of a run, direct calls and eager mode."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, WorkerShutdown, WorkerTerminate
from django.db import OperationalError, connection, connections, transaction

from django_dlock import Lock, LockedTask, locks
from django_dlock.core import dispatch
from django_dlock.core.options import DEFAULT
from django_dlock.exceptions import (
    AcquireTimeout,
    AlreadyHeld,
    AttemptsExhausted,
    DuplicateRun,
    LeaseLost,
    PayloadMismatch,
)
from django_dlock.models import IdempotencyRecord
from testproject.shop.models import Effect
from tests.support.deliveries import effects, held, in_memory, recorded, states, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@pytest.mark.parametrize("make", [task, recorded])
def test_a_delivery_leaves_no_reference_cycle(app, make):
    runs: list[weakref.ref[Any]] = []

    def body(self, order):
        runs.append(weakref.ref(self.current_run.lock))

    made = make(app, body)
    gc.disable()
    try:
        made.delay(1)
        work(app)
        assert [run() for run in runs] == [None]
    finally:
        gc.enable()


# -- the record ----------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_g12_after_an_error_in_commit_the_record_is_read_to_learn_the_outcome(
    app, monkeypatch, committed
):
    real = type(connections["default"])._commit
    errors = [OperationalError("the answer to COMMIT was lost")]

    def commit(self: Any) -> None:
        # Only for the transaction of the body, which contains the effect.
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


def test_g13_a_run_of_the_key_under_another_lock_counts_as_contention(app):
    """Two lock names for one key: only the record shows that it is the same work."""
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


@pytest.mark.parametrize("stop", [WorkerShutdown(), WorkerTerminate(), SystemExit(15 - 256)])
def test_g13_after_a_worker_stops_the_key_can_be_claimed_again(app, stop):
    def body(self, order):
        raise stop

    made = recorded(app, body)
    made.delay(1)
    with pytest.raises(type(stop)):
        work(app)
    assert states() == ["waiting"]
    assert locks["default"].get("order:1") is None


@pytest.mark.parametrize(
    "end",
    [
        SystemExit(3),
        SystemExit(-1),
        SystemExit(-9),
        SystemExit(-15),
        SystemExit([1]),
        SystemExit(),
        KeyboardInterrupt(),
    ],
)
def test_g13_a_body_that_always_ends_its_process_fails_for_good(app, end):
    """Its message comes back each time, like that of a killed child."""

    def body(self, order):
        raise end

    made = recorded(app, body, max_attempts=2)
    for _ in range(2):
        made.apply_async((1,), task_id="poison")
        with pytest.raises(type(end)):
            work(app)
        assert locks["default"].get("order:1") is None
    last = made.apply_async((1,), task_id="poison")
    try:
        work(app)
    except (SystemExit, KeyboardInterrupt):
        pytest.fail("it ran once more")
    assert isinstance(last.result, AttemptsExhausted)
    assert states() == ["failed"]


@pytest.mark.parametrize("make", [task, recorded])
def test_g13_a_body_that_was_only_created_is_no_success(app, make):
    # A decorator without ``functools.wraps`` hides that the function is a coroutine.
    async def awaited(order):
        Effect.objects.create(order_number=order, by="awaited")

    def hidden(self, order):
        return awaited(order)

    made = make(app, hidden)
    result = made.delay(1)
    work(app)
    with pytest.raises(TypeError, match="returned a coroutine, which has not run yet"):
        result.get(timeout=5)
    assert "succeeded" not in states()


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


def test_g12_a_loss_during_commit_interrupts_nothing(app, monkeypatch):
    """The exception that stops bodies can come at any point, but not here."""
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
            # ``on_lost`` is called first; the row about the loss waits for this transaction.
            dispatch.flush(0.3)
            # Enough bytecode for an exception to come in between.
            for _ in range(20):
                time.sleep(0.01)
            untouched.append(True)
        real(self)

    monkeypatch.setattr(type(connections["default"]), "_commit", commit)
    sent = recorded(app, body).delay(1)
    work(app)
    assert (untouched, runs[0].lock.lost_reason) == ([True], "broken")
    assert (sent.state, sent.result, effects(), states()) == ("SUCCESS", 1, 1, ["succeeded"])


def test_max_hold_is_the_hard_time_limit_by_default(app):
    held_for = []

    def body(self, order):
        held_for.append(self.current_run.lock._options.max_hold)

    task(app, body, time_limit=50).delay(1)
    task(app, body).apply_async((1,), time_limit=40)
    task(app, body, time_limit=50, lock_max_hold=30).delay(1)
    task(app, body).delay(1)
    for _ in range(4):
        work(app)
    assert held_for == [51, 41, 30, locks["default"].options.max_hold]


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


def test_apply_inside_the_lock_of_the_same_thread_does_not_wait_forever(app):
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


def test_eager_tasks_of_one_transaction_do_not_block_each_other(app):
    tries = []

    def body(self, order):
        tries.append(order)
        if len(tries) == 1:
            raise self.retry(countdown=0)
        return len(tries)

    made = task(app, body, lock_wait=0.05)
    with transaction.atomic():
        assert [made.apply((1,)).get(), made.apply((1,)).get()] == [2, 3]
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


def test_ignore_passes_through_the_lock_alone(app):
    def body(self, order):
        raise Ignore

    sent = task(app, body).delay(1)
    work(app)
    assert sent.state == "PENDING"
    assert locks["default"].get("order:1") is None


def test_the_default_of_lock_wait_is_that_of_the_alias():
    assert LockedTask.lock_wait is DEFAULT
