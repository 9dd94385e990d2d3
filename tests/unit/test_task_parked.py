"""The lock between two runs of a task: parked, taken over by the retry, released."""

from __future__ import annotations

import datetime as dt
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Reject, Retry
from celery.worker.request import Request
from kombu.exceptions import EncodeError, OperationalError

from django_dlock import Lock, locks, signals
from django_dlock.backends.local import LocalBackend
from django_dlock.celery.delivery import parked_lock
from django_dlock.celery.publishing import requeue
from django_dlock.core import dispatch
from django_dlock.exceptions import BackendUnavailable, LockNotAcquired
from django_dlock.models import IdempotencyRecord
from testproject.shop.models import Effect
from tests.support.deliveries import effects, held, in_memory, recorded, states, task, waiting, work
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def lease() -> Any:
    return locks["default"].get("order:1")


def kind() -> str | None:
    found = lease()
    return None if found is None else found.kind


def retrying(app: Celery, *, runs: int = 2, make: Any = task, **options: Any) -> Any:
    """A task that is retried until its last run returns."""

    def body(self, order):
        if self.request.retries < runs - 1:
            raise self.retry(countdown=100)
        return self.request.retries

    return make(app, body, lock_across_retries=True, **options)


def run(app: Celery, message: Any) -> None:
    made = app.tasks[message.headers["task"]]
    Request(message, app=app, task=made, on_ack=lambda *_: None).execute()


def elsewhere(deliver: Callable[[], object]) -> None:
    """On another thread, because the holder itself would not even ask for its lock."""
    thread = threading.Thread(target=deliver)
    thread.start()
    thread.join()


# -- parked, and taken over by the retry ---------------------------------------------------------


def test_the_lock_is_kept_through_the_countdown_of_a_retry(app):
    sent = retrying(app).delay(1)
    work(app)
    found = lease()
    assert (sent.state, found.kind, found.metadata["task_id"]) == ("RETRY", "parked", sent.id)
    assert 100 + parked_lock.GRACE - 5 < found.ttl <= 100 + parked_lock.GRACE
    work(app)
    assert (sent.state, sent.result, kind()) == ("SUCCESS", 1, None)


def test_without_the_option_the_lock_is_released(app):
    def body(self, order):
        raise self.retry(countdown=100)

    task(app, body).delay(1)
    work(app)
    assert kind() is None


def test_no_other_owner_gets_the_parked_lock(app):
    made = retrying(app, if_contended="fail")
    sent = made.delay(1)
    work(app)
    retry = waiting(app)
    stranger = made.delay(1)
    work(app)
    assert isinstance(stranger.result, LockNotAcquired)
    lock = Lock("order:1")
    assert not lock.acquire(blocking=False)
    # A waiter knows how long the lease is parked.
    assert (lock.contention.kind, lock.contention.remaining > 100) == ("parked", True)
    run(app, retry)
    assert sent.state == "SUCCESS"


def test_each_retry_parks_the_lock_again(app):
    sent = retrying(app, runs=3).delay(1)
    owners = []
    for _ in range(2):
        work(app)
        owners.append(lease().owner)
    assert len(set(owners)) == 2
    work(app)
    assert (sent.result, kind()) == (2, None)


def test_the_token_rises_from_run_to_run(app):
    tokens = []

    def body(self, order):
        tokens.append(self.current_run.lock.token)
        if not self.request.retries:
            raise self.retry(countdown=0)

    task(app, body, lock_across_retries=True).delay(1)
    work(app)
    tokens.append(lease().token)
    work(app)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 3


def test_a_second_copy_of_the_retry_meets_the_first_ones_lease(app):
    """
    retry P   replaces P's lease, runs …………………………………… returns
    copy                        also names P: too late, requeued … runs after it
    """
    runs = []

    def body(self, order):
        runs.append(self.request.retries)
        if not self.request.retries:
            raise self.retry(countdown=0)
        if len(runs) == 2:
            elsewhere(lambda: run(app, retry))
            self.current_run.lock.renew()
            beside.append(len(runs))

    beside: list[int] = []
    task(app, body, lock_across_retries=True, if_contended="fail").delay(1)
    work(app)
    retry = waiting(app)
    run(app, retry)
    assert (runs, beside) == ([0, 1], [2])
    copy = work(app)
    assert copy.headers[requeue.HEADER]["count"] == 1
    assert (runs, kind()) == ([0, 1, 1], None)


def test_a_retry_that_comes_before_its_lock_is_parked_is_requeued(app):
    """Whatever ``if_contended`` says, because it meets its own first run."""

    def body(self, order):
        if self.request.retries:
            return order
        retry = self.retry(countdown=0, throw=False)
        elsewhere(lambda: early.append(work(app)))
        raise retry

    early = []
    sent = task(app, body, lock_across_retries=True, if_contended="skip").delay(1)
    work(app)
    again = waiting(app)
    before, after = (message.headers[requeue.HEADER] for message in (early[0], again))
    assert (before["count"], after["count"]) == (0, 1)
    assert before["parked"] == after["parked"] == f"{lease().owner}:order:1"
    run(app, again)
    assert (sent.result, kind()) == (1, None)


@pytest.mark.parametrize("end", ["broken", "lapsed"])
def test_a_retry_acquires_like_others_if_nothing_is_parked_any_more(app, end):
    sent = retrying(app).delay(1)
    work(app)
    found = lease()
    if end == "broken":
        assert locks["default"].break_(found.name, owner=found.owner)
    else:
        locks["default"]._entries[found.name].until = 0
    retry = waiting(app)
    with held("order:1"):
        run(app, retry)
        assert sent.state == "RETRY"
    work(app)
    assert (sent.state, kind()) == ("SUCCESS", None)


def test_min_hold_counts_from_the_last_run(app):
    retrying(app, lock_min_hold=50).delay(1)
    work(app)
    assert (kind(), lease().ttl > 100) == ("parked", True)
    work(app)
    assert (kind(), 45 < lease().ttl <= 50) == ("cooling", True)


def test_the_process_reports_the_release_of_a_parked_lock(app):
    seen = []

    def receive(**facts: Any) -> None:
        seen.append((facts["reason"], facts["held_for"] >= 0, facts["name"]))

    signals.released.connect(receive)
    try:
        retrying(app).delay(1)
        work(app)
        dispatch.flush(30)
    finally:
        signals.released.disconnect(receive)
    assert seen == [("parked", True, "order:1")]


# -- not parked ----------------------------------------------------------------------------


def test_the_lock_is_released_when_retries_are_exhausted(app):
    def body(self, order):
        raise self.retry(countdown=0, exc=ValueError("no"))

    sent = task(app, body, lock_across_retries=True, max_retries=1).delay(1)
    work(app)
    assert kind() == "parked"
    work(app)
    assert (sent.state, type(sent.result), kind()) == ("FAILURE", ValueError, None)


def other_arguments(self: Any, order: int) -> Any:
    return self.retry(args=(order + 1,), countdown=100)


def other_headers(self: Any, order: int) -> Any:
    return self.retry(headers={"mine": "only"}, countdown=100)


def unpublished(self: Any, order: int) -> Any:
    return Retry(when=100)


def unmakeable(self: Any, order: int) -> Any:
    return self.retry(args=(None,), countdown=100)


@pytest.mark.parametrize("body", [other_arguments, other_headers, unpublished, unmakeable])
def test_the_lock_is_released_if_no_retry_was_published(app, body):
    def raises(self, order):
        raise body(self, order)

    sent = task(app, raises, lock_across_retries=True).delay(1)
    work(app)
    assert (sent.state, kind()) == ("RETRY", None)


def test_the_lock_is_released_if_the_body_continues_after_its_retry(app):
    def body(self, order):
        runs.append(self.request.retries)
        if not self.request.retries:
            self.retry(countdown=0, throw=False)

    runs: list[int] = []
    sent = task(app, body, lock_across_retries=True).delay(1)
    work(app)
    assert (sent.state, kind()) == ("SUCCESS", None)
    work(app)
    assert (runs, kind()) == ([0, 1], None)


def test_an_unnoticed_loss_is_reported_and_nothing_is_parked(app):
    reasons = []

    def body(self, order):
        assert locks["default"].break_("order:1", owner=self.current_run.lock.owner)
        raise self.retry(countdown=0)

    def receive(reason: str, **_: Any) -> None:
        reasons.append(reason)

    signals.lost.connect(receive)
    try:
        sent = task(app, body, lock_across_retries=True, if_lost="finish").delay(1)
        work(app)
        dispatch.flush(30)
    finally:
        signals.lost.disconnect(receive)
    assert (sent.state, reasons, kind()) == ("RETRY", ["broken"], None)


@pytest.mark.parametrize("carried_out", [True, False])
def test_g5_a_parking_without_an_answer_is_cancelled_and_blocks_nobody(
    app, monkeypatch, caplog, carried_out
):
    real = LocalBackend.acquire

    def acquire(self: LocalBackend, request: Any, *, deadline: float) -> Any:
        if request.kind == "parked":
            if carried_out:
                real(self, request, deadline=deadline)
            raise BackendUnavailable("no answer")
        return real(self, request, deadline=deadline)

    monkeypatch.setattr(LocalBackend, "acquire", acquire)
    sent = retrying(app).delay(1)
    work(app)
    eventually(lambda: kind() is None)
    assert "not kept for the retry" in caplog.text
    work(app)
    assert (sent.state, kind()) == ("SUCCESS", None)


def test_g7_an_interrupt_during_parking_leaves_nothing_behind(app, monkeypatch):
    class Interrupted(Exception):
        pass

    real = LocalBackend.acquire

    def acquire(self: LocalBackend, request: Any, *, deadline: float) -> Any:
        answer = real(self, request, deadline=deadline)
        if request.kind == "parked":
            raise Interrupted
        return answer

    monkeypatch.setattr(LocalBackend, "acquire", acquire)
    sent = retrying(app).delay(1)
    work(app)
    assert sent.state == "RETRY"
    eventually(lambda: kind() is None)


def test_an_eager_retry_runs_under_the_same_rules_and_parks_nothing(app):
    kinds = []

    def body(self, order):
        kinds.append(kind())
        if len(kinds) < 3:
            raise self.retry(countdown=100)
        return len(kinds)

    made = task(app, body, lock_across_retries=True, lock_wait=0.05)
    assert made.apply((1,)).get() == 3
    assert (kinds, kind()) == (["held"] * 3, None)


# -- released for good ---------------------------------------------------------------------------


def test_the_lock_parked_for_a_message_that_never_runs_is_released(app):
    made = retrying(app)
    made.delay(1)
    work(app)
    retry = waiting(app)
    parked_lock.on_task_revoked(made, Context(retry.headers), terminated=False)
    eventually(lambda: kind() is None)


def test_the_lease_of_a_running_retry_is_not_released(app, monkeypatch):
    seen = []

    def at_once(backend: LocalBackend, request: Any) -> None:
        backend.cancel_acquire(request, deadline=backend.call_deadline())

    monkeypatch.setattr(parked_lock.cleanup, "cancel_later", at_once)

    def body(self, order):
        if not self.request.retries:
            raise self.retry(countdown=0)
        parked_lock.on_task_revoked(made, Context(messages[0].headers), terminated=True)
        self.current_run.lock.renew()
        seen.append(kind())

    made = task(app, body, lock_across_retries=True)
    made.delay(1)
    work(app)
    messages = [waiting(app)]
    run(app, messages[0])
    assert seen == ["held"]


# -- when a retry comes --------------------------------------------------------------------

NOW = dt.datetime.now(dt.timezone.utc)
"""The time when the tests were collected, which may be long before they run."""


@pytest.mark.parametrize(
    ("when", "seconds"),
    [
        (None, 0),
        (0, 0),
        (7.5, 7.5),
        (NOW + dt.timedelta(hours=10), 36_000),
        (NOW - dt.timedelta(hours=10), 0),
        ((NOW + dt.timedelta(hours=10)).astimezone(dt.timezone(dt.timedelta(hours=5))), 36_000),
        # Celery reads a time without a zone as UTC.
        ((NOW + dt.timedelta(hours=10)).replace(tzinfo=None), 36_000),
        pytest.param((NOW + dt.timedelta(hours=10)).isoformat(), 36_000, id="text"),
    ],
)
def test_the_time_of_a_retry_may_be_given_in_each_of_celerys_ways(app, when, seconds):
    app.conf.timezone = "Asia/Tokyo"
    assert parked_lock._seconds_until(task(app), when) == pytest.approx(seconds, abs=3000)


def test_a_run_that_died_before_its_retry_was_published_counts_once(app):
    """Two messages of one task: the redelivered one, and the retry."""

    def body(self, order):
        runs.append(self.request.retries)
        if len(runs) == 1:
            self.retry(countdown=0, throw=False)
            raise SystemExit
        return order

    runs: list[int] = []
    made = recorded(app, body, lock_across_retries=True)
    sent = made.delay(1)
    first = waiting(app)
    with pytest.raises(SystemExit):
        run(app, first)
    assert (states(), kind()) == (["running"], None)
    run(app, first)
    work(app)
    assert (sent.result, runs, states(), effects()) == (1, [0, 0], ["succeeded"], 0)


# -- Celery's own retries ------------------------------------------------------------------


def test_the_lock_is_kept_during_the_delay_of_an_automatic_retry(app):
    def body(self, order):
        if self.request.retries < 2:
            raise ValueError("again")

    sent = task(
        app,
        body,
        lock_across_retries=True,
        autoretry_for=(ValueError,),
        retry_backoff=100,
        retry_jitter=False,
    ).delay(1)
    for countdown in (100, 200):
        work(app)
        assert countdown + parked_lock.GRACE - 5 < lease().ttl <= countdown + parked_lock.GRACE
    work(app)
    assert (sent.state, kind()) == ("SUCCESS", None)


def test_g13_retries_do_not_count_as_deaths(app):
    sent = retrying(app, runs=4, make=recorded, max_attempts=1).delay(1)
    for _ in range(4):
        work(app)
    record = IdempotencyRecord.objects.get()
    assert (sent.result, record.state, record.attempt, record.deaths) == (3, "succeeded", 4, 0)


# -- a retry that cannot be published ------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "options", "comes_again"),
    [
        (OperationalError("broker away"), {}, True),
        (OSError("broker away"), {}, True),
        (EncodeError("not of JSON"), {}, False),
        # Acknowledged before the body: no message is left that could be returned.
        (OperationalError("broker away"), {"acks_late": False}, False),
    ],
)
def test_g13_a_retry_without_a_broker_leaves_its_message_in_the_queue(
    app, monkeypatch, error, options, comes_again
):
    def body(self, order):
        Effect.objects.create(order_number=order, by=self.name[:40])
        raise self.retry(countdown=0)

    def refuse(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(requeue, "REJECT_PAUSE", 0)
    made = (recorded if comes_again else task)(app, body, lock_across_retries=True, **options)
    made.delay(1)
    message = waiting(app)
    monkeypatch.setattr(app, "send_task", refuse)
    outcome = Request(
        message, app=app, task=made, on_ack=lambda *_: None, on_reject=lambda *_: None
    ).execute()
    assert isinstance(outcome.exception.exc, Reject)
    assert outcome.exception.exc.requeue is comes_again
    assert kind() is None
    if comes_again:
        assert (states(), effects()) == (["waiting"], 0)
        # The exception goes from the child to the worker.
        assert pickle.loads(pickle.dumps(outcome.exception.exc)).requeue
