"""How a worker checks for dead children; without a real worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import Celery
from kombu.asynchronous import Hub, get_event_loop, set_event_loop

from django_dlock.celery.worker import reaping
from tests.support.workers import eventually


@pytest.fixture
def hub() -> Iterator[Hub]:
    before = get_event_loop()
    hub = set_event_loop(Hub())
    yield hub
    hub.close()
    set_event_loop(before)


def run(hub: Hub, until: Callable[[], object]) -> None:
    def turn() -> bool:
        next(hub.loop)
        return bool(until())

    eventually(turn)


class Pool:
    checks = 0

    def maintain_pool(self) -> None:
        self.checks += 1


class Controller:
    def __init__(self, app: Celery) -> None:
        self.app = app


class Consumer:
    def __init__(self, hub: Hub | None) -> None:
        self.hub, self.pool = hub, Pool()


def test_g4_a_worker_checks_often_for_dead_children(hub, monkeypatch):
    monkeypatch.setattr(reaping, "PERIOD", 0.01)
    app = Celery("reaping", set_as_current=False)
    reaping.reap_often(Controller(app))
    (step_class,) = app.steps["consumer"]
    consumer = Consumer(hub)
    step = step_class(consumer)
    step.start(consumer)
    run(hub, lambda: consumer.pool.checks > 2)
    step.stop(consumer)
    assert all(scheduled.entry.canceled for scheduled in hub.timer.queue)


def test_g4_a_worker_continues_its_checks_after_a_reconnection(hub, monkeypatch):
    """Some versions of Celery clear all timers, and some versions of kombu replace the loop."""
    monkeypatch.setattr(reaping, "PERIOD", 0.01)
    consumer = Consumer(hub)
    step = reaping.ReapChildren(consumer)
    step.start(consumer)
    hub.reset()
    hub.timer.clear()
    step.start(consumer)
    run(hub, lambda: consumer.pool.checks > 2)
    assert get_event_loop() is hub
    assert sum(not scheduled.entry.canceled for scheduled in hub.timer.queue) == 1


def test_a_worker_without_a_loop_checks_in_a_thread():
    consumer = Consumer(None)
    step = reaping.ReapChildren(consumer)
    step.start(consumer)
    step.stop(consumer)
    assert consumer.pool.checks == 0
