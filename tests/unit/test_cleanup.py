"""Attempts that nobody waits for are cancelled, however long the backend is unreachable."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from django_dlock import Lock, locks
from django_dlock.core import cleanup, dispatch
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import LeaseRequest


def test_a_cancellation_is_repeated_until_the_backend_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = locks["local"]
    tries: list[str] = []
    done = threading.Event()

    def answer_third(request: LeaseRequest, **_: Any) -> None:
        tries.append(request.owner)
        if len(tries) < 3:
            raise BackendUnavailable("down")
        done.set()

    monkeypatch.setattr(cleanup, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(backend, "cancel_acquire", answer_third)
    cleanup.cancel_later(backend, LeaseRequest("it", "me", 30))
    assert done.wait(30)
    assert tries == ["me", "me", "me"]


def test_an_error_and_a_handler_that_hangs_do_not_stop_the_next_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = locks["local"]
    done = threading.Event()

    class Hanging(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            done.wait(60)

    def answer(request: LeaseRequest, **_: Any) -> None:
        if request.owner == "first":
            raise ZeroDivisionError("a bug")
        done.set()

    monkeypatch.setattr(backend, "cancel_acquire", answer)
    handler = Hanging()
    logging.getLogger("django_dlock").addHandler(handler)
    try:
        cleanup.cancel_later(backend, LeaseRequest("it", "first", 30))
        cleanup.cancel_later(backend, LeaseRequest("it", "second", 30))
        assert done.wait(10)
    finally:
        done.set()
        logging.getLogger("django_dlock").removeHandler(handler)


def test_an_outage_is_probed_with_one_request_by_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = locks["local"]
    asked, cancelled = threading.Semaphore(0), threading.Semaphore(0)
    is_up, tries = threading.Event(), list[str]()

    def answer(request: LeaseRequest, **_: Any) -> None:
        tries.append(request.owner)
        asked.release()
        if not is_up.is_set():
            raise BackendUnavailable("down")
        cancelled.release()

    monkeypatch.setattr(cleanup, "FIRST_PAUSE", 0.3)
    monkeypatch.setattr(backend, "cancel_acquire", answer)
    for number in range(50):
        cleanup.cancel_later(backend, LeaseRequest("it", f"n{number}", 30))
    assert [thread.name for thread in threading.enumerate()].count("dlock-cleanup") == 1
    assert asked.acquire(timeout=30)
    assert asked.acquire(timeout=30)
    failed = len(tries)
    is_up.set()
    for _ in range(50):
        assert cancelled.acquire(timeout=30)
    # Another one at most may have been under way.
    assert failed <= len(tries) - 50 <= failed + 1 <= 4


def test_of_too_many_requests_the_oldest_are_dropped_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = locks["local"]
    under_way, goes_on, done = threading.Event(), threading.Event(), threading.Event()
    cancelled: list[str] = []

    def answer(request: LeaseRequest, **_: Any) -> None:
        under_way.set()
        assert goes_on.wait(30)
        cancelled.append(request.owner)
        if request.owner == "n5":
            done.set()

    monkeypatch.setattr(cleanup, "MOST_QUEUED", 3)
    monkeypatch.setattr(backend, "cancel_acquire", answer)
    cleanup.cancel_later(backend, LeaseRequest("it", "n0", 30))
    assert under_way.wait(30)
    for number in range(1, 6):
        cleanup.cancel_later(backend, LeaseRequest("it", f"n{number}", 30))
    goes_on.set()
    assert done.wait(30)
    assert cancelled == ["n0", "n3", "n4", "n5"]
    assert dispatch.flush(30)
    assert caplog.text.count("their leases end with their TTL") == 1


def test_what_was_never_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = locks["local"]
    cancelled: list[str] = []
    done = threading.Event()

    def answer(request: LeaseRequest, **_: Any) -> None:
        cancelled.append(request.owner)
        done.set()

    def acquire(request: LeaseRequest, **_: Any) -> None:
        error = BackendUnavailable("down")
        error.unsent = unsent.pop(0)
        raise error

    unsent = [True]
    monkeypatch.setattr(backend, "cancel_acquire", answer)
    monkeypatch.setattr(backend, "acquire", acquire)
    with pytest.raises(BackendUnavailable):
        Lock("it", using="local").acquire(blocking=False)
    # An earlier try may have been received, whatever becomes of the last one.
    unsent = [False, *[True] * 1000]
    with pytest.raises(BackendUnavailable):
        Lock("it", using="local").acquire(timeout=0.2)
    assert done.wait(30)
    assert len(cancelled) == 1


def test_a_release_without_an_answer_is_repeated_with_its_min_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks.reset()
    backend = locks["local"]
    release, done = backend.release, threading.Event()

    def down(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(backend, "release", answer)
        raise BackendUnavailable("down")

    def answer(*args: Any, **kwargs: Any) -> Any:
        outcome = release(*args, **kwargs)
        done.set()
        return outcome

    monkeypatch.setattr(backend, "release", down)
    lock = Lock("it", using="local", min_hold=60)
    lock.acquire()
    with pytest.raises(BackendUnavailable):
        lock.release()
    assert done.wait(30)
    info = backend.get("it")
    assert info is not None
    assert info.kind == "cooling"
