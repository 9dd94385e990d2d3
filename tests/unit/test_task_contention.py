"""What a delivery does if it cannot get its lock, or reach its database."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.worker.request import Request
from django.db import InterfaceError, OperationalError

from django_dlock import Lock, locks
from django_dlock.celery.publishing import broker, requeue
from django_dlock.celery.publishing.unique import send_safely
from django_dlock.exceptions import AcquireTimeout, BackendUnavailable, LockNotAcquired
from django_dlock.records import idempotency
from tests.conftest import NOBODY
from tests.support.deliveries import effects, held, in_memory, recorded, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def test_g13_a_contended_task_is_published_again_unchanged(app):
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


def test_a_requeue_uses_the_queue_it_came_from(app):
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


def test_the_count_of_requeues_ends_where_the_body_begins(app):
    """A retry that meets contention counts from its own start, not from before its first run."""

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


def test_g13_the_message_is_published_again_before_the_old_one_is_acknowledged(app):
    found = []

    def end(*_: Any) -> None:
        found.append(waiting(app))

    made = task(app)
    with held("order:1"):
        sent = made.delay(1)
        Request(waiting(app), app=app, task=made, on_ack=end, on_reject=end).execute()
    assert [again.headers["id"] for again in found] == [sent.id]


def test_g13_a_requeue_at_the_hard_time_limit_leaves_the_outcome_to_the_worker(app):
    """The worker may report FAILURE, acknowledge and kill before the message is published."""
    made = task(app, time_limit=0.5)
    with held("order:1"):
        sent = made.delay(1)
        work(app)
    assert waiting(app).headers["id"] == sent.id
    assert sent.state == "PENDING"


def test_g13_a_message_that_cannot_be_published_is_returned(app, monkeypatch):
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
    assert f"Holder: process {os.getpid()} on " in str(sent.result)
    assert ", since " in sent.result.holder


@pytest.mark.parametrize("policy", ["skip", "fail", "wait"])
def test_g13_a_copy_of_the_running_task_itself_is_requeued_whatever_the_policy(app, policy):
    """If the holder is its dead original, skipping the copy would lose the task."""
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
    assert f"Holder: process {os.getpid()} on " in str(sent.result)


def test_a_requeued_task_names_the_process_of_the_holder(app, caplog):
    made = task(app)
    with held("order:1"), caplog.at_level(logging.INFO, "django_dlock"):
        made.delay(1)
        work(app)
    (told,) = [it.getMessage() for it in caplog.records if "is requeued" in it.getMessage()]
    assert f"Holder: process {os.getpid()} on " in told


def test_a_contended_task_is_not_logged_as_an_error(app, caplog):
    made = task(app)
    with held("order:1"):
        made.delay(1)
        work(app)
    # Locks of other tests may be collected during this one, with a warning.
    ours = [it for it in caplog.records if getattr(it, "lock_name", "order:1") == "order:1"]
    assert [record for record in ours if record.levelname in ("ERROR", "WARNING")] == []


# -- outages -------------------------------------------------------------------------------


@pytest.fixture
def no_backend(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def acquire(*args: Any, **options: Any) -> Any:
        raise BackendUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(type(locks["default"]), "acquire", acquire)
        yield


def test_g13_a_task_is_requeued_while_the_backend_is_unreachable(app, no_backend, caplog):
    sent = task(app).delay(1)
    work(app)
    assert sent.state == "RETRY"
    assert waiting(app) is not None
    assert [each.levelname for each in caplog.records if "requeued" in each.message] == ["WARNING"]


def test_if_unavailable_may_fail_or_skip(app, no_backend):
    failed, skipped = task(app, if_unavailable="fail"), task(app, if_unavailable="skip")
    sent = failed.delay(1), skipped.delay(1)
    work(app), work(app)
    assert isinstance(sent[0].result, BackendUnavailable)
    assert (sent[1].state, sent[1].result) == ("SUCCESS", None)
    assert effects() == 0


@pytest.mark.parametrize("outage", ["before", "during"])
def test_if_unavailable_local_excludes_within_the_process_and_logs_it(
    app, monkeypatch, caplog, outage
):
    from django_dlock.backends.local import LocalBackend

    nested = []
    real = LocalBackend.acquire

    def acquire(self: LocalBackend, request: Any, *, deadline: float) -> Any:
        # If the outage begins during the first run, that run has its lock from the backend.
        if self is locks["default"] and (nested or outage == "before"):
            raise BackendUnavailable("no answer")
        return real(self, request, deadline=deadline)

    def body(self, order):
        if not nested:
            nested.append(True)
            made.delay(order)
            other = threading.Thread(target=work, args=(app,))
            other.start()
            other.join(20)
            nested.append(waiting(app) is not None)
        return order

    made = task(app, body, if_unavailable="local")
    monkeypatch.setattr(LocalBackend, "acquire", acquire)
    sent = made.delay(1)
    work(app)
    assert sent.state == "SUCCESS"
    assert nested == [True, True]
    assert ("in this process only" in caplog.text) == (outage == "before")


@pytest.mark.parametrize("kind", [OperationalError, InterfaceError])
@pytest.mark.parametrize("place", ["claim", "complete"])
def test_g13_a_task_is_requeued_while_the_database_is_unreachable(app, monkeypatch, kind, place):
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
    """Most likely the same outage made the body fail."""

    def body(self, order):
        raise OperationalError("gone")

    def fail(*args: Any, **options: Any) -> Any:
        raise OperationalError("still gone")

    monkeypatch.setattr(idempotency, "mark_failed", fail)
    sent = recorded(app, body).delay(1)
    work(app)
    assert sent.state == "RETRY"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="shows open files on Linux only")
def test_reading_the_broker_settings_opens_no_files():
    app = Celery("files", broker=NOBODY, set_as_current=False)
    made, files = task(app), Path("/proc/self/fd")

    def ask() -> int:
        send_safely(made, lambda **options: None, {})
        broker.is_outage(app, ValueError())
        requeue._delay(made, 1)
        return len(list(files.iterdir()))

    before = ask()
    gc.disable()
    try:
        assert [ask() for _ in range(5)] == [before] * 5
    finally:
        gc.enable()


def test_g13_a_folder_that_accepts_no_message_is_an_outage(tmp_path):
    """It is not a message that can never be published, although kombu raises a channel error."""
    folder = tmp_path / "not a folder"
    folder.touch()
    app = Celery("files", broker="filesystem://", set_as_current=False)
    app.conf.broker_transport_options = {
        "data_folder_in": str(tmp_path),
        "data_folder_out": str(folder),
        "control_folder": str(tmp_path / "control"),
    }
    with pytest.raises(Exception) as refused:  # noqa: PT011
        app.send_task("any", retry=False)
    if isinstance(refused.value, UnboundLocalError):
        pytest.skip("a mistake in kombu 5.5 hides the error of the broker")
    assert "Cannot add file" in str(refused.value)
    assert broker.is_outage(app, refused.value)


def test_g13_a_soft_limit_just_after_publishing_is_no_failure(app, monkeypatch):
    def log(level: int, message: str, *args: object, **facts: object) -> None:
        if "is requeued" in message:
            raise SoftTimeLimitExceeded

    monkeypatch.setattr(requeue.logger, "log", log)
    made = task(app)
    with held("order:1"):
        sent = made.delay(1)
        work(app)
    assert sent.state == "RETRY"
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)
