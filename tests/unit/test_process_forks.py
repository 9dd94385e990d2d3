"""A fork waits for threads that connect or end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from django_dlock import clock, process
from django_dlock.backends.connector import Connector
from django_dlock.process import forks
from tests.support.points import heard
from tests.support.tls_lock import PATIENCE, TlsLock, exit_code, noted_forks


@pytest.fixture
def lock() -> Iterator[TlsLock]:
    """A thread that holds it may end once a fork waits for it."""
    with noted_forks() as waits:
        yield TlsLock(may_end=waits)


@pytest.fixture
def never_connects(monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsLock]:
    """Held by an attempt to connect until the end of the test."""
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    end = threading.Event()
    lock = TlsLock(may_end=end)
    assert Connector(lock.hold).connect(clock.now()) is None
    assert lock.taken.wait(PATIENCE)
    yield lock
    end.set()


def test_g8_a_fork_waits_for_a_connection_that_is_being_made(lock: TlsLock) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(Connector(lock.hold).connect, clock.now() + PATIENCE)
        assert lock.taken.wait(PATIENCE)
        assert lock.is_free_in_child()
        assert call.exception(PATIENCE) is None


def test_g8_a_fork_waits_for_a_thread_to_end(lock: TlsLock) -> None:
    def end() -> None:
        process.thread_ends()
        lock.hold()

    threading.Thread(target=end, daemon=True).start()
    assert lock.taken.wait(PATIENCE)
    assert lock.is_free_in_child()


def test_a_fork_does_not_wait_for_a_server_that_never_answers(never_connects: TlsLock) -> None:
    assert not never_connects.is_free_in_child()


def test_a_fork_waits_only_once_for_an_attempt_that_never_ends(never_connects: TlsLock) -> None:
    assert exit_code(lambda: 0) == 0
    with noted_forks():
        began = time.monotonic()
        assert exit_code(lambda: 0) == 0
        assert time.monotonic() - began < PATIENCE / 2


def test_g8_nobody_connects_because_a_fork_has_waited_in_vain(
    never_connects: TlsLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    # Enough for a busy machine to get from the wait to the fork.
    monkeypatch.setattr(forks, "PATIENCE", 1.0)

    def connect_meanwhile() -> None:
        forking.wait()
        Connector(begun.set).connect(clock.now() + PATIENCE)

    with heard("fork.waits") as forking, ThreadPoolExecutor(1) as pool:
        other = pool.submit(connect_meanwhile)
        assert exit_code(lambda: int(begun.is_set())) == 0
        other.result(PATIENCE)
    assert begun.is_set()


def test_a_fork_does_not_wait_longer_while_the_process_computes(
    monkeypatch: pytest.MonkeyPatch, never_connects: TlsLock
) -> None:
    slept: list[float] = []
    me = threading.get_ident()

    def sleep(seconds: float) -> None:
        # Threads that earlier tests have left behind may wait for this fork, too.
        if threading.get_ident() == me:
            slept.append(seconds)
        # Until another thread gives way to this one.
        sleep_for_real(10 * seconds)

    sleep_for_real = time.sleep
    monkeypatch.setattr(time, "sleep", sleep)
    assert exit_code(lambda: 0) == 0
    assert 0 < len(slept) <= 0.05 / 0.01


def test_g8_a_fork_waits_although_signal_handlers_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, handled, reported = threading.Event(), threading.Semaphore(0), list[Any]()
    lock = TlsLock(may_end)

    def interrupt(*_: object) -> None:
        handled.release()
        if forking.count() and not goes_on.count():
            raise KeyboardInterrupt

    def send() -> None:
        forking.wait()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert handled.acquire(timeout=PATIENCE)
            # For a fork that waits on; one that does not is over by then, usually.
            time.sleep(0.1)
        may_end.set()

    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    earlier = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with (
            noted_forks(),
            heard("fork.waits") as forking,
            heard("fork.goes_on") as goes_on,
            ThreadPoolExecutor(2) as pool,
        ):
            pool.submit(Connector(lock.hold).connect, clock.now() + PATIENCE)
            assert lock.taken.wait(PATIENCE)
            pool.submit(send)
            assert lock.is_free_in_child()
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert [it.exc_type for it in reported] == [KeyboardInterrupt]


def test_a_fork_takes_place_although_the_clock_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, reported = 0, list[Any]()

    def raises() -> float:
        nonlocal calls
        calls += 1
        if 1 < calls < 1000:
            raise ZeroDivisionError
        return 0.0

    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    monkeypatch.setattr(forks, "time", SimpleNamespace(monotonic=raises))
    assert exit_code(lambda: 0) == 0
    assert calls < 1000
    assert [it.exc_type for it in reported] == [ZeroDivisionError]


def test_g8_a_fork_waits_for_the_end_of_a_thread_whose_attempt_took_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connects, goes_on = threading.Event(), threading.Event()

    def connect_and_end() -> None:
        with process.connecting(ends=True):
            connects.set()
            goes_on.wait(PATIENCE)
        lock.hold()

    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    threading.Thread(target=connect_and_end, daemon=True).start()
    assert connects.wait(PATIENCE)
    assert exit_code(lambda: 0) == 0
    with noted_forks() as waits:
        lock = TlsLock(may_end=waits)
        goes_on.set()
        assert lock.taken.wait(PATIENCE)
        assert lock.is_free_in_child()


def test_a_fork_does_not_wait_for_a_thread_that_has_connected_and_goes_on() -> None:
    def connect() -> None:
        with process.connecting():
            pass

    with noted_forks(), ThreadPoolExecutor(1) as pool:
        pool.submit(connect).result(PATIENCE)
        began = time.monotonic()
        assert exit_code(lambda: 0) == 0
        assert time.monotonic() - began < PATIENCE / 2


def test_a_fork_does_not_wait_for_its_own_thread() -> None:
    with noted_forks():
        began = time.monotonic()
        with process.connecting(ends=True):
            assert exit_code(lambda: 0) == 0
        assert exit_code(lambda: 0) == 0
        assert time.monotonic() - began < PATIENCE / 2


def test_a_fork_forgets_an_id_that_another_thread_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        # This thread does not end, as if it had the id of one that has ended.
        monkeypatch.setattr(forks, "PATIENCE", 0.05)
        pool.submit(process.thread_ends).result(PATIENCE)
        with noted_forks():
            began = time.monotonic()
            assert exit_code(lambda: 0) == 0
            assert time.monotonic() - began < PATIENCE / 2


def test_without_proc_a_fork_waits_for_some_time_after_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forks, "TASKS", "/nowhere")
    monkeypatch.setattr(forks, "PATIENCE", 0.2)
    began = time.monotonic()
    assert Connector(str).connect(clock.now() + PATIENCE) == ""
    assert exit_code(lambda: 0) == 0
    assert time.monotonic() - began >= 0.2


def test_g8_no_thread_begins_to_connect_while_another_one_forks() -> None:
    may_end, begun = threading.Event(), threading.Event()
    lock = TlsLock(may_end)

    def connect_meanwhile() -> None:
        assert waits.wait(PATIENCE)
        call = pool.submit(Connector(begun.set).connect, clock.now())
        begun.wait(0.2)
        may_end.set()
        call.result(PATIENCE)

    with noted_forks() as waits, ThreadPoolExecutor(3) as pool:
        held = pool.submit(Connector(lock.hold).connect, clock.now() + PATIENCE)
        assert lock.taken.wait(PATIENCE)
        other = pool.submit(connect_meanwhile)
        assert exit_code(lambda: int(begun.is_set())) == 0
        assert begun.wait(PATIENCE)
        held.result(PATIENCE)
        other.result(PATIENCE)


def test_g8_a_child_connects_at_once() -> None:
    with noted_forks():
        connect = Connector(str).connect
        assert exit_code(lambda: int(connect(clock.now() + PATIENCE / 2) != "")) == 0


def test_a_process_that_never_forks_forgets_threads_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forks, "PATIENCE", -1.0)
    connector, noted_earlier = Connector(str), len(forks._notes)
    for _ in range(20):
        # Not a connection, but it is made on a thread.
        assert connector.connect(clock.now() + PATIENCE) == ""
    assert len(forks._notes) <= noted_earlier + 2


def test_g8_an_unseen_fork_is_noticed_although_a_signal_handler_raised_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks: list[int] = []
    monkeypatch.setattr(forks, "_at_fork", [{"after_in_child": lambda: hooks.append(1)}])

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_name == "_run_hooks_of_child" and event == "line":
            lines -= 1
            if lines == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return interrupt

    before, number, interrupted = sys.gettrace(), 0, True
    while interrupted:
        number += 1
        lines, interrupted = number, False
        monkeypatch.setattr(forks, "_pid", 0)
        monkeypatch.setattr(forks, "_noticing", {})
        sys.settrace(interrupt)
        try:
            process.notice_fork()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        noticed = forks._pid == os.getpid()
        hooks.clear()
        process.notice_fork()
        assert noticed or hooks, number
    assert number > 5
