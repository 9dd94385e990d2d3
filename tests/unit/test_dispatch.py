"""The events thread delivers in order, survives receivers, and is replaced when one hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from django_dlock.core import dispatch
from django_dlock.core.dispatch import EventQueue


@pytest.fixture
def deliverer() -> EventQueue:
    return EventQueue()


def test_deliveries_are_made_in_order_on_one_thread(deliverer: EventQueue) -> None:
    told: list[tuple[int, str]] = []
    for i in range(100):
        deliverer.post(lambda i=i: told.append((i, threading.current_thread().name)))  # type: ignore[misc]
    assert deliverer.flush(30)
    assert told == [(i, "dlock-dispatch") for i in range(100)]


def test_the_idle_thread_is_woken_for_what_was_put(deliverer: EventQueue) -> None:
    # Then it waits for as long as nobody wakes it.
    assert deliverer.flush(30)
    made = threading.Event()
    deliverer.put(made.set)
    deliverer.nudge()
    assert made.wait(30)


def test_a_delivery_that_raises_does_not_stop_the_next(
    deliverer: EventQueue, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> None:
        raise SystemExit("receiver")

    deliverer.post(raises)
    assert deliverer.flush(30)
    assert "raised" in caplog.text


def test_another_thread_takes_over_from_a_hanging_delivery(
    deliverer: EventQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, free = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        free.wait(30)

    deliverer.post(hang)
    assert hangs.wait(30)
    monkeypatch.setattr(dispatch, "HANGING_AFTER", 0.0)
    try:
        assert deliverer.flush(30), "the second thread delivers"
    finally:
        free.set()
    assert deliverer.flush(30)


def fork(code: Callable[[], int] = lambda: 0) -> int:
    """Fork; return the child's exit code, which is its result."""
    pid = os.fork()
    if pid == 0:
        os._exit(code())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_waits_for_the_current_delivery(
    deliverer: EventQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the child would have half of it forever, for example a lock inside SQLite."""
    # A busy machine may take longer for a delivery than a fork waits.
    monkeypatch.setattr(dispatch, "FORK_PATIENCE", 30.0)
    began, inside = threading.Event(), [0]

    def deliver() -> None:
        inside[0] = 1
        began.set()
        time.sleep(0.1)
        inside[0] = 0

    for _ in range(3):
        deliverer.post(deliver)
    assert began.wait(30)
    assert fork(lambda: inside[0]) == 0
    assert deliverer.flush(30)


def test_a_fork_waits_only_briefly_for_a_delivery_that_hangs(
    deliverer: EventQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "FORK_PATIENCE", 0.05)
    hangs, free = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        free.wait(30)

    deliverer.post(hang)
    assert hangs.wait(30)
    # The child starts its own thread.
    assert fork(lambda: not deliverer.flush(30)) == 0
    free.set()
    assert deliverer.flush(30)


def test_a_receiver_may_fork(deliverer: EventQueue) -> None:
    codes: list[int] = []
    deliverer.post(lambda: codes.append(fork()))
    assert deliverer.flush(30)
    assert codes == [0]


def test_the_queue_is_bounded(deliverer: EventQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, free = threading.Event(), threading.Event()
    told: list[int] = []

    def hang() -> None:
        hangs.set()
        free.wait(30)

    deliverer.post(hang)
    assert hangs.wait(30)
    with monkeypatch.context() as narrow:
        narrow.setattr(dispatch, "MAX_QUEUED", 3)
        for i in range(10):
            deliverer.post(lambda i=i: told.append(i))  # type: ignore[misc]
    free.set()
    assert deliverer.flush(30)
    assert told == [0, 1, 2]


def test_a_call_is_made_at_once_if_no_thread_can_start(
    deliverer: EventQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As while the interpreter ends.
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[str] = []
    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", refuse)
        deliverer.post_or_call(lambda: told.append(threading.current_thread().name))
    assert told == [threading.current_thread().name]
    assert deliverer.flush(30)
    assert len(told) == 1
