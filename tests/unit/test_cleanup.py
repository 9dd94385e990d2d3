"""Attempts that nobody waits for are cancelled, however long the backend is unreachable."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from django_dlock import Lock, locks
from django_dlock.core import cleanup
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


def test_an_unexpected_error_does_not_stop_the_next_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = locks["local"]
    done = threading.Event()

    def answer(request: LeaseRequest, **_: Any) -> None:
        if request.owner == "first":
            raise ZeroDivisionError("a bug")
        done.set()

    monkeypatch.setattr(backend, "cancel_acquire", answer)
    cleanup.cancel_later(backend, LeaseRequest("it", "first", 30))
    cleanup.cancel_later(backend, LeaseRequest("it", "second", 30))
    assert done.wait(30)


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
