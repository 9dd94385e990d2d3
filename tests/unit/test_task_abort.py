"""Interrupting a body from another thread, and never any other code."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from django.db import connection, transaction

from django_dlock import Lock
from django_dlock.celery.delivery import interrupt as interrupting
from django_dlock.celery.delivery.interrupt import BodyRunner, LeaseAborted
from django_dlock.exceptions import LeaseLost
from testproject.shop.models import Effect


def interrupt(guard: BodyRunner) -> None:
    # Not in the body's own thread: ``Thread.start`` turns an exception within it into a KeyError.
    done = threading.Event()
    asked.put((guard, done))
    done.wait()


asked: SimpleQueue[tuple[BodyRunner, threading.Event]] = SimpleQueue()


def interrupt_those_that_ask() -> None:
    while True:
        guard, done = asked.get()
        guard.interrupt(None, "broken")
        done.set()


threading.Thread(target=interrupt_those_that_ask, daemon=True).start()


def spin_until(stop: threading.Event) -> None:
    """Runs bytecode, so that an interrupt can come in between."""
    while not stop.wait(0.001):
        pass


def test_a_body_is_stopped_when_its_lease_is_lost():
    guard = BodyRunner()
    never = threading.Event()

    def body() -> None:
        interrupt(guard)
        spin_until(never)

    with pytest.raises(LeaseLost):
        guard.run(body)
    assert guard.interrupted
    assert guard.reason == "broken"


def test_a_body_that_swallows_the_exception_is_stopped_again():
    guard = BodyRunner()
    swallowed = []

    def body() -> None:
        while len(swallowed) < 3:
            try:
                if not swallowed:
                    interrupt(guard)
                spin_until(threading.Event())
            except Exception as error:  # noqa: PERF203 - every turn is to be interrupted
                swallowed.append(type(error))

    # If it returns nevertheless, that is no success.
    with pytest.raises(LeaseAborted):
        guard.run(body)
    assert swallowed == [LeaseAborted] * 3


@pytest.mark.django_db(transaction=True)
def test_g12_the_bodys_own_commit_is_not_interrupted(monkeypatch):
    guard, looked = BodyRunner(), threading.Semaphore(0)
    monkeypatch.setattr(interrupting, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(interrupting, "LONGEST_PAUSE", 0.001)

    def look(frame: FrameType | None, real: Any = interrupting._is_committing_or_releasing) -> bool:
        looked.release()
        return bool(real(frame))

    monkeypatch.setattr(interrupting, "_is_committing_or_releasing", look)

    def commit() -> None:
        interrupt(guard)
        for _ in range(3):
            assert looked.acquire(timeout=10)
        real()
        committed.append(True)

    def body() -> None:
        with transaction.atomic():
            monkeypatch.setattr(connection, "_commit", commit)
            Effect.objects.create(order_number=1, by="body", delivery="1")
        spin_until(threading.Event())

    real, committed = connection._commit, []
    with pytest.raises(LeaseAborted):
        guard.run(body)
    assert committed == [True]
    assert Effect.objects.count() == 1


def test_the_bodys_own_release_is_not_interrupted(monkeypatch):
    guard, released = BodyRunner(), []
    monkeypatch.setattr(interrupting, "FIRST_PAUSE", 0.001)

    def release(lock: Lock, hold: object) -> Iterator[Any]:
        interrupt(guard)
        for _ in range(1000):
            threading.Event().wait(0.0001)
        released.append(lock.name)
        yield from ()

    hold = SimpleNamespace(lease=SimpleNamespace(backend=None))
    monkeypatch.setattr(Lock, "_current", lambda lock, verb: hold)
    monkeypatch.setattr(Lock, "_release_flow", release)
    with pytest.raises(LeaseAborted):
        guard.run(lambda: (Lock("own").release(), spin_until(threading.Event())))
    assert released == ["own"]


@pytest.mark.django_db(transaction=True)
def test_a_body_that_runs_after_a_commit_is_stopped():
    """As in eager mode with ``delay_on_commit``."""
    guard = BodyRunner()

    def body() -> None:
        interrupt(guard)
        # It would end by itself some time.
        for _ in range(20_000):
            threading.Event().wait(0.001)

    with pytest.raises(LeaseAborted), transaction.atomic():
        transaction.on_commit(lambda: guard.run(body))


def test_a_body_does_not_begin_after_a_loss():
    guard = BodyRunner()
    interrupt(guard)
    with pytest.raises(LeaseAborted):
        guard.run(pytest.fail)


def test_a_loss_after_the_body_interrupts_nothing():
    guard = BodyRunner()
    assert guard.run(lambda: "done") == "done"
    guard._keep_interrupting()
    assert not guard.interrupted


def test_nothing_is_interrupted_once_the_body_has_ended():
    """The loss comes while the body returns, repeatedly; later code is never interrupted."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(300):
            guard = BodyRunner()
            ready = threading.Event()

            def lose(guard: BodyRunner = guard, ready: threading.Event = ready) -> None:
                ready.wait()
                interrupt(guard)

            loser = threading.Thread(target=lose)
            loser.start()
            try:
                guard.run(ready.set)
            except LeaseAborted:
                pass
            # Bookkeeping code: any exception here fails the test.
            loser.join()
            sum(range(200))
            assert guard._ended.is_set()
    finally:
        sys.setswitchinterval(interval)


def test_a_profiler_does_not_hang_after_a_body():
    """CPython 3.11 hangs after an asynchronous exception was withdrawn."""
    import cProfile

    BodyRunner().run(lambda: None)
    assert cProfile.Profile().runcall(sum, (each for each in range(10))) == 45


def test_the_bodys_own_exception_propagates():
    with pytest.raises(ZeroDivisionError):
        BodyRunner().run(lambda: 1 // 0)


def test_the_exception_survives_pickling_and_needs_no_argument():
    error = pickle.loads(pickle.dumps(LeaseAborted()))
    assert isinstance(error, LeaseLost)
    assert "lease was lost" in str(error)
