"""A worker that looks for dead children, without a worker."""

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
    looks = 0

    def maintain_pool(self) -> None:
        self.looks += 1


class Controller:
    def __init__(self, app: Celery) -> None:
        self.app = app


class Consumer:
    def __init__(self, hub: Hub | None) -> None:
        self.hub, self.pool = hub, Pool()


def test_g4_a_worker_looks_often_for_dead_children(hub, monkeypatch):
    monkeypatch.setattr(reaping, "PERIOD", 0.01)
    app = Celery("reaping", set_as_current=False)
    reaping.reap_often(Controller(app))
    (step,) = app.steps["consumer"]
    consumer = Consumer(hub)
    look = step(consumer)
    look.start(consumer)
    run(hub, lambda: consumer.pool.looks > 2)
    look.stop(consumer)
    assert all(scheduled.entry.canceled for scheduled in hub.timer.queue)


def test_g4_a_worker_looks_on_once_it_is_connected_again(hub, monkeypatch):
    """Some versions of Celery clear all timers, and of kombu forget the loop."""
    monkeypatch.setattr(reaping, "PERIOD", 0.01)
    consumer = Consumer(hub)
    look = reaping.ReapChildren(consumer)
    look.start(consumer)
    hub.reset()
    hub.timer.clear()
    look.start(consumer)
    run(hub, lambda: consumer.pool.looks > 2)
    assert get_event_loop() is hub
    assert sum(not scheduled.entry.canceled for scheduled in hub.timer.queue) == 1


def test_a_worker_without_a_loop_has_a_thread_that_looks():
    consumer = Consumer(None)
    look = reaping.ReapChildren(consumer)
    look.start(consumer)
    look.stop(consumer)
    assert consumer.pool.looks == 0
