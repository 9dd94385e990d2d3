"""Deliveries that end in unusual ways: none has a wrong outcome, and none repeats forever."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, group
from celery.exceptions import Ignore, TimeLimitExceeded

from django_dlock import Lock, locks
from django_dlock.celery.delivery import locking
from django_dlock.celery.publishing import requeue
from django_dlock.exceptions import (
    AttemptsExhausted,
    BackendUnavailable,
    DuplicateRun,
    LeaseLost,
    LockNotAcquired,
    PayloadMismatch,
)
from django_dlock.models import IdempotencyRecord
from testproject.shop.models import Effect
from tests.support.deliveries import effects, held, in_memory, recorded, states, task, waiting, work
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The count from which the delay of each requeued message is computed."""
    counts: list[int] = []

    def delay(task: Any, count: int) -> float:
        counts.append(count)
        return 0

    monkeypatch.setattr(requeue, "_delay", delay)
    return counts


def lose(lock: Lock) -> None:
    """Break the lock under its holder, and let the holder notice."""
    assert locks["default"].break_(lock.name, owner=lock.owner)
    with pytest.raises(LeaseLost):
        lock.renew()


def no_answer(*args: Any, **options: Any) -> Any:
    raise BackendUnavailable("no answer", "it", "default")


# -- the record counts before the lock -----------------------------------------------------

ENDS = [
    {"if_contended": "fail"},
    {"if_contended": "skip"},
    {"if_contended": "wait", "lock_wait": 0},
    {"if_contended": "requeue", "contention_timeout": 0},
]


def contended_until_the_end(app: Celery, made: Any, **options: Any) -> Any:
    """The result of a task that meets another holder as long as it may be requeued."""
    with held("order:1"):
        sent = made.apply_async((1,), **options)
        while (message := work(app)) and sent.state == "RETRY":
            assert (message.headers.get(requeue.HEADER) or {}).get("count", 0) < 10
    return sent


@pytest.mark.parametrize("options", ENDS)
def test_g12_a_redelivery_during_another_holders_lock_gets_its_recorded_result(app, options):
    made = recorded(app, **options)
    sent = made.delay(1)
    work(app)
    app.backend.forget(sent.id)
    contended_until_the_end(app, made, task_id=sent.id)
    assert (sent.state, sent.result, effects()) == ("SUCCESS", 1, 1)


@pytest.mark.parametrize("if_duplicate", ["return", "skip", "fail"])
@pytest.mark.parametrize("options", ENDS)
def test_g12_a_duplicate_during_another_holders_lock_gets_the_outcome_in_its_record(
    app, options, if_duplicate
):
    made = recorded(app, if_duplicate=if_duplicate, **options)
    made.delay(1)
    work(app)
    again = contended_until_the_end(app, made)
    if if_duplicate == "fail":
        assert isinstance(again.result, DuplicateRun)
        assert "order:1" in str(again.result)
    else:
        assert (again.state, again.result) == (
            "SUCCESS",
            1 if if_duplicate == "return" else None,
        )


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_g12_a_redelivery_in_an_outage_gets_its_recorded_result(app, monkeypatch, policy):
    made = recorded(app, if_unavailable=policy)
    sent = made.delay(1)
    work(app)
    app.backend.forget(sent.id)
    monkeypatch.setattr(type(locks["default"]), "acquire", no_answer)
    made.apply_async((1,), task_id=sent.id)
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", 1)


@pytest.mark.parametrize("options", ENDS[:3])
def test_unfinished_work_ends_as_its_options_say(app, options):
    sent = contended_until_the_end(app, recorded(app, **options))
    if options["if_contended"] == "skip":
        assert (sent.state, sent.result) == ("SUCCESS", None)
    else:
        assert isinstance(sent.result, LockNotAcquired)
    assert states() == []


def test_g14_another_payload_is_an_error_even_if_contention_is_skipped(app):
    made = recorded(app, if_contended="skip")
    made.delay(1)
    work(app)
    with held("order:1"):
        sent = made.delay(1, note="other")
        work(app)
    assert isinstance(sent.result, PayloadMismatch)


def test_g13_a_copy_that_meets_another_lock_does_not_set_the_originals_result(app):
    """Two lock names for one key: the copy finds another holder while its original runs."""

    def body(self, order, name):
        if not copies:
            copies.append(made.apply_async((order, "b"), task_id=self.request.id))
            with held("b"):
                work(app)
            copies.append(copies[0].state)
        return name

    copies: list[Any] = []
    made = recorded(
        app, body, lock_key="{name}", idempotency_payload=["order"], if_contended="fail"
    )
    sent = made.delay(1, "a")
    work(app)
    assert copies[1] == "RETRY"
    assert (sent.state, sent.result) == ("SUCCESS", "a")
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", "a")


# -- runs that end without an outcome ------------------------------------------------------


def losing(self, order):
    """Loses its lease each time and reports it."""
    Effect.objects.create(order_number=order, by="losing")
    lock = self.current_run.lock
    lose(lock)
    lock.check()


@pytest.mark.parametrize("make", [task, recorded])
def test_a_task_that_always_loses_its_lease_fails_for_good(app, make, delays):
    sent = make(app, losing, max_attempts=3).delay(1)
    for _ in range(2):
        work(app)
        assert sent.state == "RETRY"
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)
    assert waiting(app) is None
    assert delays == [1, 2]


@pytest.mark.parametrize("make", [task, recorded])
def test_g13_after_leases_lost_in_an_outage_delays_grow_and_the_task_never_fails(
    app, make, delays, monkeypatch
):
    def away(self, order):
        monkeypatch.setattr(Lock, "lost_reason", "unreachable")
        lock = self.current_run.lock
        raise LeaseLost("no answer", lock.name, lock.alias, "unreachable")

    sent = make(app, away, max_attempts=2).delay(1)
    for _ in range(5):
        work(app)
        assert sent.state == "RETRY"
    assert delays == [1, 2, 3, 4, 5]


class Alarm(BaseException):
    """Like ``gevent.Timeout``, or a project's own exception."""


@pytest.mark.parametrize("error", [asyncio.CancelledError("x"), Alarm(), GeneratorExit()])
@pytest.mark.parametrize("make", [task, recorded])
def test_g13_a_body_that_ends_with_a_base_exception_is_requeued_and_finally_fails(
    app, make, error, delays
):
    def body(self, order):
        Effect.objects.create(order_number=order, by="body")
        raise error

    made = make(app, body, max_attempts=2, unique_until="done")
    sent = made.delay(1)
    work(app)
    assert sent.state == "RETRY"
    assert locks["default"].get("order:1") is None
    assert locks["default"].list(prefix="unique:") != []
    work(app)
    assert isinstance(sent.result, AttemptsExhausted)
    assert type(error).__name__ in str(sent.result)
    assert locks["default"].list() == []
    if make is recorded:
        assert (effects(), states()) == (0, ["failed"])


@pytest.mark.parametrize("kind", ["GreenletExit", "Timeout", "other Timeout"])
def test_exceptions_that_end_a_greenlet_are_left_to_celery_but_not_a_bodys_own_timeout(
    app, monkeypatch, kind
):
    class Ends(BaseException):
        seconds = 50.0 if kind == "Timeout" else 5

    def body(self, order):
        raise Ends

    name = kind.split()[-1]
    module = "greenlet" if name == "GreenletExit" else "gevent"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: Ends}))
    sent = recorded(app, body, time_limit=50).delay(1)
    if kind == "other Timeout":
        work(app)
        assert sent.state == "RETRY"
    else:
        with pytest.raises(Ends):
            work(app)
    assert states() == ["waiting"]


def test_g13_an_exception_after_the_commit_does_not_undo_the_success(app, monkeypatch):
    from django.db import connections

    real = type(connections["default"])._commit

    def commit(self: Any) -> None:
        real(self)
        if effects():
            raise Alarm

    made = recorded(app)
    with monkeypatch.context() as patched:
        patched.setattr(type(connections["default"]), "_commit", commit)
        sent = made.delay(1)
        work(app)
    assert (sent.state, sent.result, states()) == ("SUCCESS", 1, ["succeeded"])


def test_after_a_failure_before_its_body_a_task_can_be_published_again(app):
    """``before_start`` runs before the delivery; only Celery knows of the failure."""

    def before_start(self, *args):
        raise RuntimeError("no")

    made = task(app, unique_until="done", before_start=before_start)
    sent = made.delay(1)
    work(app)
    assert sent.state == "FAILURE"
    eventually(lambda: locks["default"].list(prefix="unique:") == [])


# -- the time limit in pools that do not enforce it ----------------------------------------------


@pytest.mark.parametrize("make", [task, recorded])
def test_a_time_limit_that_no_pool_enforces_fails_a_task_once(app, make, monkeypatch):
    runs = []

    def body(self, order):
        runs.append(order)
        never = threading.Event()
        while not never.wait(0.001):
            pass

    monkeypatch.setattr(locking, "KILL_GRACE", 0.0)
    # Like a pool of threads, this one ends no body, and its margin at the limit is not reached.
    made = make(app, body, time_limit=0.5)
    sent = made.delay(1)
    work(app)
    assert isinstance(sent.result, TimeLimitExceeded)
    assert (len(runs), waiting(app)) == (1, None)
    if make is recorded:
        assert states() == ["failed"]


# -- lasting contention -----------------------------------------------------------------


def test_contention_ends_after_its_time_and_after_five_attempts(app):
    made = task(app, contention_timeout=0)
    with held("order:1"):
        sent = made.delay(1)
        for _ in range(4):
            work(app)
            assert sent.state == "RETRY"
        work(app)
    assert (sent.state, type(sent.result)) == ("FAILURE", LockNotAcquired)


def test_attempts_during_an_outage_do_not_count_as_contention(app, monkeypatch):
    made = task(app, contention_timeout=0)
    sent = made.delay(1)
    with monkeypatch.context() as patched:
        patched.setattr(type(locks["default"]), "acquire", no_answer)
        for _ in range(6):
            work(app)
    with held("order:1"):
        for _ in range(4):
            work(app)
            assert sent.state == "RETRY"


def test_contention_may_last_for_two_visibility_timeouts(app):
    made = task(app)
    assert locking.contention_timeout(made) == 7200
    app.conf.broker_transport_options = {"visibility_timeout": 43200}
    assert locking.contention_timeout(made) == 86400
    assert locking.contention_timeout(task(app, contention_timeout=60)) == 60


def test_waiting_for_anothers_run_of_the_key_ends_after_the_contention_timeout(app):
    """It runs under another lock; only the record shows that it is the same work."""
    nested = []

    def body(self, order, name):
        if not nested:
            nested.append(made.delay(order, "other"))
            for _ in range(5):
                work(app)
        return order

    made = recorded(
        app,
        body,
        lock_key="{name}",
        idempotency_payload=["order"],
        contention_timeout=0,
        atomic=False,
    )
    made.delay(1, "one")
    work(app)
    assert (nested[0].state, type(nested[0].result)) == ("FAILURE", LockNotAcquired)
    assert waiting(app) is None


def test_g13_a_copy_never_fails_while_it_waits_for_its_original(app):
    nested = []

    def body(self, order, name):
        if not nested:
            nested.append(made.apply_async((order, "other"), task_id=self.request.id))
            for _ in range(7):
                work(app)
        return order

    made = recorded(
        app,
        body,
        lock_key="{name}",
        idempotency_payload=["order"],
        contention_timeout=0,
        atomic=False,
    )
    sent = made.delay(1, "one")
    work(app)
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", 1)


# -- changed arguments of one task -------------------------------------------------------


def test_g14_a_retry_with_other_arguments_is_no_mismatch(app):
    def body(self, order, note=""):
        if not self.request.retries:
            raise self.retry(kwargs={"note": "second"}, countdown=0)
        return note

    sent = recorded(app, body).delay(1)
    work(app)
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", "second")


def test_g14_a_body_that_changed_its_arguments_may_be_retried(app):
    def body(self, order, rows):
        rows.append(len(rows))
        if not self.request.retries:
            raise ValueError
        return rows

    made = recorded(app, body, autoretry_for=(ValueError,), retry_kwargs={"countdown": 0})
    sent = made.delay(1, [])
    work(app)
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", [0, 1])


def test_g14_another_task_with_the_first_payload_of_a_retried_one_is_a_mismatch(app):
    def body(self, order, note=""):
        if not self.request.retries:
            raise self.retry(kwargs={"note": "second"}, countdown=0)
        return note

    made = recorded(app, body)
    made.delay(1)
    work(app)
    work(app)
    again = [made.delay(1), made.delay(1, note="second")]
    work(app)
    work(app)
    assert isinstance(again[0].result, PayloadMismatch)
    assert again[1].result == "second"


# -- recorded results ----------------------------------------------------------------------


@pytest.mark.parametrize("store_result", [True, False])
def test_g12_a_run_that_ended_with_ignore_is_recorded_as_ignored(app, store_result):
    """Otherwise a redelivery would return ``None``, and the rest of its chain would run with it."""

    def body(self, order):
        raise Ignore

    made = recorded(app, body, store_result=store_result)
    other = task(app)
    sent = made.delay(1)
    work(app)
    made.apply_async((1,), task_id=sent.id, link=other.s())
    work(app)
    assert sent.state == "PENDING"
    assert waiting(app) is None
    assert IdempotencyRecord.objects.get().ending == "ignored"


def test_g12_a_run_whose_result_is_not_stored_is_recorded_as_returned(app):
    made = recorded(app, store_result=False)
    sent = made.delay(1)
    work(app)
    app.backend.forget(sent.id)
    made.apply_async((1,), task_id=sent.id)
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", None)


@pytest.mark.parametrize("of", ["AsyncResult", "GroupResult"])
def test_g12_results_of_celerys_own_are_recorded_as_celery_stores_them(app, of):
    def body(self, order):
        Effect.objects.create(order_number=order, by="body")
        return group(other.s(order), other.s(order)).delay() if of == "GroupResult" else found

    other = task(app)
    found = other.AsyncResult("an id")
    made = recorded(app, body)
    sent = made.delay(1)
    work(app)
    again = made.delay(1)
    while again.state == "PENDING":
        work(app)
    assert (sent.state, again.state) == ("SUCCESS", "SUCCESS")
    assert again.result == sent.result
    assert Effect.objects.filter(by="body").count() == 1


def test_g12_a_result_that_cannot_be_recorded_is_left_out_with_a_warning(app, caplog):
    def body(self, order):
        return Effect.objects.create(order_number=order, by="body")

    made = recorded(app, body, ignore_result=True)
    made.delay(1)
    work(app)
    assert (effects(), states()) == (1, ["succeeded"])
    assert f"Task {made.name}: the result is not recorded" in caplog.text
    again = made.apply((1,))
    assert (again.state, again.result, effects()) == ("SUCCESS", None, 1)


# -- a removed alias -----------------------------------------------------------------


def test_g13_a_run_under_a_removed_alias_is_requeued_and_the_log_names_a_solution(app, caplog):
    made = recorded(app)
    sent = made.delay(1)
    work(app)
    IdempotencyRecord.objects.update(state="running", lock_alias="gone", task_id="another")
    sent = made.delay(1)
    work(app)
    assert (sent.state, effects()) == ("RETRY", 1)
    assert "alias 'gone'" in caplog.text
    assert "forget the record with force=True" in caplog.text
    record = IdempotencyRecord.objects.get()
    assert not IdempotencyRecord.objects.forget(record.scope, record.key)
    assert IdempotencyRecord.objects.forget(record.scope, record.key, force=True)
    made.delay(1)
    work(app)
    assert effects() == 2


# -- looking for a record ------------------------------------------------------------


def test_a_record_is_not_looked_for_by_the_argument_instead_of_the_key(app):
    made = recorded(app)
    with pytest.raises(TypeError, match=r"key is 7; .*'7' for .*'order:7' for 'order:"):
        IdempotencyRecord.objects.forget(made.name, 7)
    with pytest.raises(TypeError, match=r"scope is .*; it takes a string, such as the name"):
        IdempotencyRecord.objects.for_key(made, "7")
