"""Fences in the bodies of tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from django_dlock import Lock, StaleToken
from django_dlock.models import Fence
from testproject.shop.models import Effect, Stock
from tests.support.deliveries import effects, in_memory, recorded, states, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


def book(order: int) -> None:
    Effect.objects.create(order_number=order, by="it")


def sell(self, order):
    lock = self.current_run.lock
    with lock.atomic():
        book(order)
        lock.fence(Stock.objects.filter(article=order)).update(count=1)
    return lock.token


def test_a_body_writes_under_the_lock_of_its_run(app):
    Stock.objects.create(article=1)
    sent = task(app, sell).delay(1)
    work(app)
    assert effects() == 1
    assert sent.result == Stock.objects.get().fence == Fence.objects.get().token


def test_g13_a_body_whose_write_was_refused_for_a_newer_holder_runs_again(app):
    """A refused write is one way to learn of a loss, and often the first."""

    def body(self, order):
        lock = self.current_run.lock
        with lock.atomic():
            pass
        if self.current_run.lock.token == first.setdefault("token", lock.token):
            Fence.objects.update(token=lock.token + 1)
        with lock.atomic():
            book(order)

    first: dict[str, int] = {}
    sent = task(app, body).delay(1)
    work(app)
    assert (sent.state, effects()) == ("RETRY", 0)
    work(app)
    assert (sent.state, effects()) == ("SUCCESS", 1)
    assert waiting(app) is None


def test_g13_after_a_refused_write_the_key_of_a_recorded_body_can_be_claimed_again(app):
    """Also if the record's transaction surrounds it."""

    def body(self, order):
        stock = Stock.objects.get()
        if not refused:
            refused.append(True)
            Stock.objects.update(fence=self.current_run.lock.token + 1)
            book(order)
            self.current_run.lock.fence(stock).save()
        book(order)

    Stock.objects.create(article=1)
    refused: list[bool] = []
    sent = recorded(app, body).delay(1)
    work(app)
    assert (sent.state, effects(), states()) == ("RETRY", 0, ["waiting"])
    work(app)
    assert (sent.state, effects(), states()) == ("SUCCESS", 1, ["succeeded"])


def test_a_write_refused_for_another_lock_is_an_ordinary_error(app):
    def body(self, order):
        with Lock("other") as other:
            with other.atomic():
                pass
            Fence.objects.update(token=other.token + 1)
            with other.atomic():
                pass

    sent = task(app, body).delay(1)
    work(app)
    assert sent.state == "FAILURE"
    assert isinstance(sent.result, StaleToken)
