"""Leases of a project on SQLite, in a file beside the project's: threads and processes share it."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend, table
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease, LeaseRequest
from tests.support import databases

PROCESSES, TURNS = 4, 40

MakeBackend = Callable[..., DatabaseBackend]


@pytest.fixture
def project(tmp_path: Path, django_db_blocker: DjangoDbBlocker) -> Iterator[Path]:
    """The file of a project's database, known as the alias ``file``."""
    path = tmp_path / "project.sqlite3"
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    with databases.added("file", settings), django_db_blocker.unblock():
        yield path


@pytest.fixture
def make(project: Path) -> Iterator[MakeBackend]:
    """Makes backends that keep their leases beside ``project``."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> DatabaseBackend:
            backend = DatabaseBackend(
                AliasOptions("file", "database", options={"database": "file"}, **options)
            )
            stack.callback(backend.close)
            return backend

        yield make


def request(name: str = "name", **kwargs: Any) -> LeaseRequest:
    return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=30.0, **kwargs)


def ask(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease | Contention:
    return backend.acquire(attempt, deadline=backend.call_deadline())


def grant(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease:
    answer = ask(backend, attempt)
    assert isinstance(answer, Lease), answer
    return answer


def release(backend: DatabaseBackend, lease: Lease) -> str:
    return backend.release(lease.name, lease.owner, min_hold=0.0, deadline=backend.call_deadline())


def test_threads_that_use_an_alias_first_at_the_same_time_share_its_store(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, made, second = make(), list[object](), threading.Event()
    real = table.Store

    def slow_store(options: AliasOptions) -> Any:
        made.append(options)
        if len(made) > 1:
            second.set()
        # Over at once if another thread makes a store, too.
        second.wait(0.3)
        return real(options)

    monkeypatch.setattr(table, "Store", slow_store)
    stores: list[Any] = []
    threads = [
        threading.Thread(target=lambda: stores.append(backend._table.store)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(stores) == 3
    assert len(set(map(id, stores))) == 1


def test_a_waiter_gets_its_place_in_the_queue_however_fast_others_change_the_row(
    make: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = make(), make(command_timeout=0.2)
    held = [grant(fast, request())]
    dialect = slow._table.store.dialect
    read = dialect.read

    def read_and_be_overtaken(*args: Any) -> Any:
        found = read(*args)
        # Nobody else can write while the waiter does.
        with contextlib.suppress(BackendUnavailable):
            release(fast, held[-1])
            held.append(grant(fast, request()))
        return found

    monkeypatch.setattr(dialect, "read", read_and_be_overtaken)
    waiter = request(waits=True)
    assert isinstance(ask(slow, waiter), Contention)
    monkeypatch.undo()
    assert release(fast, held[-1]) == "released"
    assert isinstance(ask(fast, request()), Contention)
    assert isinstance(ask(slow, waiter), Lease)


@pytest.mark.timeout(300)
def test_every_one_of_several_processes_gets_its_share_of_turns(
    project: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.turns", str(project), str(log), str(TURNS)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    try:
        for process in running:
            assert process.stdout.readline() == "ready\n"
        for process in running:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.wait(280) for process in running] == [0] * PROCESSES
    finally:
        for process in running:
            process.kill()
            process.communicate()
    turns = log.read_text().split()
    assert len(turns) == PROCESSES * TURNS
    first_to_end = min(last_turn(turns, pid) for pid in set(turns))
    shares = Counter(turns[: first_to_end + 1])
    assert len(shares) == PROCESSES
    assert min(shares.values()) >= TURNS / 5, shares


def last_turn(turns: list[str], pid: str) -> int:
    return len(turns) - 1 - turns[::-1].index(pid)
