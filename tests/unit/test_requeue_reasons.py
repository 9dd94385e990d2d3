"""Why a delivery was requeued, as the metrics and the page of lock statistics count it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from django.db import OperationalError

from django_dlock import Lock, LockNotAcquired, locks, signals
from django_dlock.backends.local import LocalBackend
from django_dlock.core import dispatch
from django_dlock.exceptions import BackendUnavailable
from django_dlock.records import idempotency
from django_dlock.records.claims import InFlight
from tests.support.deliveries import held, in_memory, recorded, task, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


class Told(Counter[tuple[str, str]]):
    """How often each signal came with each reason."""

    def receive(self, sender: object, *, signal: Any, reason: str, **_: Any) -> None:
        self["requeued" if signal is signals.requeued else "not acquired", reason] += 1


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    for signal in (signals.requeued, signals.gave_up):
        signal.connect(made.receive)
    yield made
    for signal in (signals.requeued, signals.gave_up):
        signal.disconnect(made.receive)


def deliver(app: Celery, made: Any) -> None:
    made.delay(1)
    work(app)
    dispatch.flush()


@pytest.fixture
def no_answer(monkeypatch: pytest.MonkeyPatch, app: Celery) -> None:
    real = LocalBackend.acquire

    def acquire(self: LocalBackend, request: Any, *, deadline: float) -> Any:
        if self is locks["default"]:
            raise BackendUnavailable("no answer")
        return real(self, request, deadline=deadline)

    monkeypatch.setattr(LocalBackend, "acquire", acquire)


def test_a_lock_that_is_held_is_not_acquired_and_requeued(app, told):
    with held("order:1"):
        deliver(app, task(app))
    assert told == {("not acquired", "contended"): 1, ("requeued", "contended"): 1}


def test_a_store_without_an_answer_is_not_acquired_and_requeued(app, told, no_answer):
    deliver(app, task(app))
    assert told == {("not acquired", "unavailable"): 1, ("requeued", "unavailable"): 1}


def test_a_lock_of_this_process_is_no_reason_to_requeue(app, told, no_answer, monkeypatch):
    """The lock was not acquired, but the task ran; what then requeues it is another matter."""

    def complete(*_: Any, **__: Any) -> None:
        raise OperationalError("away")

    monkeypatch.setattr(idempotency, "complete", complete)
    deliver(app, recorded(app, if_unavailable="local"))
    assert told == {("not acquired", "unavailable"): 1, ("requeued", "other"): 1}


def test_a_run_in_progress_is_requeued_although_no_lock_was_refused(app, told, monkeypatch):
    """The record names another run, which holds another lock."""
    found = InFlight("default", "order:1", "somebody", "another task")
    monkeypatch.setattr(idempotency, "claim", lambda *_, **__: found)
    deliver(app, recorded(app))
    assert told == {("requeued", "in_progress"): 1}


def test_a_plain_lock_that_is_not_acquired_requeues_nothing(app, told):
    with held("order:1"):
        assert not Lock("order:1").acquire(blocking=False)
        with pytest.raises(LockNotAcquired), Lock("order:1", wait=0):
            pass
        deliver(app, task(app, if_contended="skip"))
    dispatch.flush()
    assert told == {("not acquired", "contended"): 3}
