"""Two messages for one tick of a schedule: the second one ends, and never runs late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from django_dlock import locks
from django_dlock.celery import owners
from tests.support.deliveries import effects, in_memory, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def test_a_message_that_meets_a_cooling_lock_ends_without_a_run(app):
    made = task(app, if_contended="skip", lock_min_hold=60)
    sent = [made.delay(1), made.delay(1)]
    work(app)
    assert locks["default"].get("order:1").kind == "cooling"
    work(app)
    assert [each.state for each in sent] == ["SUCCESS", "SUCCESS"]
    assert [each.result for each in sent] == [1, None]
    assert waiting(app) is None
    assert effects() == 1


@pytest.mark.parametrize("now", ["gone", "its own"])
def test_a_holder_of_another_task_that_ends_meanwhile_is_no_copy(app, now, monkeypatch):
    """Its lease ends, or goes to a copy of this message, just after the attempt."""
    made = task(app, if_contended="skip", lock_min_hold=60)
    made.delay(1)
    work(app)
    holder = locks["default"].get("order:1")
    sent = made.delay(1)
    holder.metadata["task_id"] = sent.id
    found = {"gone": None, "its own": holder}[now]
    monkeypatch.setattr(type(locks["default"]), "get", lambda *args: found)
    work(app)
    assert (sent.state, sent.result) == ("SUCCESS", None)
    assert waiting(app) is None


def test_a_retry_waits_until_the_lock_of_its_own_task_has_cooled(app):
    """It is no second message, so skipping it would lose the task."""

    def body(self, order):
        raise self.retry(countdown=0, exc=RuntimeError("again"))

    made = task(app, body, if_contended="skip", lock_min_hold=60)
    sent = made.delay(1)
    work(app)
    work(app)
    assert sent.state == "RETRY"
    assert type(sent.result).__name__ == "LockNotAcquired"
    assert waiting(app) is not None


def test_an_owner_identifies_its_task_only():
    one = owners.new("one")
    assert one != owners.new("one")
    assert owners.is_of(one, "one") is True
    assert owners.is_of(one, "two") is False
    assert owners.is_of("0123456789abcdef", "one") is None
    assert len(owners.new("x" * 1000)) < 64


def test_an_owner_identifies_its_delivery() -> None:
    first = owners.in_child(owners.new("one"), 7)
    later = owners.again(first, 12)
    assert later != first
    assert owners.is_of(later, "one") is True
    assert owners.is_of_delivery(first, first)
    assert owners.is_of_delivery(later, first)
    assert not owners.is_of_delivery(later, owners.in_child(owners.new("one"), 7))
