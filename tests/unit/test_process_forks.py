"""A fork waits for threads that connect or end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_dlock import clock, process
from django_dlock.backends.connector import Connector
from django_dlock.process import forks
from tests.support.tls_lock import PATIENCE, TlsLock, exit_code, noted_forks


@pytest.fixture
def lock() -> Iterator[TlsLock]:
    """A thread that holds it may end once a fork has begun."""
    with noted_forks() as begun:
        yield TlsLock(may_end=begun)


@pytest.fixture
def never_connects(monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsLock]:
    """Held by an attempt to connect until the end of the test."""
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    end = threading.Event()
    lock = TlsLock(may_end=end)
    assert Connector(lock.hold).connect(clock.now()) is None
    assert lock.taken.wait(PATIENCE)
    yield lock
    assert not end.is_set()
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


def test_a_fork_forgets_a_number_that_another_thread_has_now(
    lock: TlsLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    process.thread_ends()
    monkeypatch.setattr(forks, "PATIENCE", PATIENCE)
    assert exit_code(lambda: 0) == 0
    assert threading.get_native_id() not in forks._threads


def test_a_child_does_not_wait_for_threads_of_its_parent(
    never_connects: TlsLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork_again() -> int:
        monkeypatch.setattr(forks, "PATIENCE", 10 * PATIENCE)
        return exit_code(lambda: 0)

    assert exit_code(fork_again) == 0


def test_a_process_that_never_forks_forgets_threads_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forks, "PATIENCE", -1.0)
    connector, noted_earlier = Connector(str), len(forks._threads)
    for _ in range(20):
        # Not a connection, but it is made on a thread.
        assert connector.connect(clock.now() + PATIENCE) == ""
    assert len(forks._threads) <= noted_earlier + 2
