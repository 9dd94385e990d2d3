"""The events thread delivers in order, survives receivers, and is replaced when one hangs."""

from __future__ import annotations

import threading

import pytest

from django_dlock import events
from django_dlock.events import Deliverer


@pytest.fixture
def deliverer() -> Deliverer:
    return Deliverer()


def test_deliveries_come_in_order_on_one_thread(deliverer: Deliverer) -> None:
    told: list[tuple[int, str]] = []
    for i in range(100):
        deliverer.post(lambda i=i: told.append((i, threading.current_thread().name)))  # type: ignore[misc]
    assert deliverer.flush()
    assert told == [(i, "dlock-events") for i in range(100)]


def test_a_delivery_that_raises_does_not_stop_the_next(
    deliverer: Deliverer, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> None:
        raise SystemExit("receiver")

    deliverer.post(raises)
    assert deliverer.flush()
    assert "raised" in caplog.text


def test_another_thread_takes_over_from_a_hanging_delivery(
    deliverer: Deliverer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, free = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        free.wait(30)

    deliverer.post(hang)
    assert hangs.wait(5)
    monkeypatch.setattr(events, "HANGING_AFTER", 0.0)
    try:
        assert deliverer.flush(), "the second thread delivers"
    finally:
        free.set()
    assert deliverer.flush()


def test_the_queue_is_bounded(deliverer: Deliverer, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, free = threading.Event(), threading.Event()
    told: list[int] = []

    def hang() -> None:
        hangs.set()
        free.wait(30)

    deliverer.post(hang)
    assert hangs.wait(5)
    with monkeypatch.context() as narrow:
        narrow.setattr(events, "MAX_QUEUED", 3)
        for i in range(10):
            deliverer.post(lambda i=i: told.append(i))  # type: ignore[misc]
    free.set()
    assert deliverer.flush()
    assert told == [0, 1, 2]
