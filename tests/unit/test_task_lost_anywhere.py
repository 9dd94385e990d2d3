"""Leases lost at any moment of a delivery, from before its body to after its release."""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from celery import Celery

from django_dlock import locks
from django_dlock.models import IdempotencyRecord
from testproject.shop.models import Effect
from tests.support.deliveries import in_memory, recorded, waiting, work
from tests.support.leases import leases_in

pytestmark = pytest.mark.django_db(transaction=True)

ROUNDS = 150
SEED = 20240229


@pytest.fixture
def app() -> Iterator[Celery]:
    interval = sys.getswitchinterval()
    # Let the interrupting thread run between any two bytecodes, not only every 5 ms.
    sys.setswitchinterval(1e-5)
    with in_memory() as app:
        yield app
    sys.setswitchinterval(interval)


def lose(order: int, after: float) -> None:
    """As if an operator broke the lock and a renewal noticed it."""
    time.sleep(after)
    for hold in leases_in():
        if hold.name == f"order:{order}" and locks["default"].break_(hold.name, owner=hold.owner):
            hold.lose("broken")


def test_g12_a_loss_at_any_moment_doubles_nothing_and_loses_nothing(app):
    def body(self, order):
        Effect.objects.create(order_number=order, by=self.name[:40])
        for _ in range(2000):
            pass
        return order

    made, moments = recorded(app, body), random.Random(SEED)
    lasted = []
    for order in range(ROUNDS):
        # The first runs measure how long a delivery takes.
        usual = statistics.median(lasted) if order >= 10 else 0.0
        breaker = threading.Thread(target=lose, args=(order, moments.uniform(0, 1.2 * usual)))
        sent = made.delay(order)
        if order >= 10:
            breaker.start()
        began = time.perf_counter()
        work(app)
        lasted.append(time.perf_counter() - began)
        if order >= 10:
            breaker.join()
        while sent.state == "RETRY":
            work(app)
        assert (sent.state, sent.result) == ("SUCCESS", order)
        assert Effect.objects.filter(order_number=order).count() == 1
    assert waiting(app) is None
    states = set(IdempotencyRecord.objects.values_list("state", "deaths"))
    assert states == {("succeeded", 0)}
    # Some must have been stopped in the middle; otherwise the test shows nothing.
    assert IdempotencyRecord.objects.filter(attempt__gt=1).count() > ROUNDS / 20
