"""Leases of a project on SQLite: threads and processes share them, and processes fork."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from django_dlock import clock
from django_dlock.backends import sqlite_forks
from django_dlock.backends.database import table
from django_dlock.backends.database.connection import Connection
from django_dlock.backends.database.lease_memory import MemoryPool
from django_dlock.backends.database.sqlite import sole_writer
from django_dlock.exceptions import BackendRefused, BackendUnavailable
from django_dlock.lease import Contention, Lease
from tests.support import forking
from tests.support.at_nth import AtNth
from tests.support.database_bed import store_of, table_of
from tests.support.lease_files import (
    Child,
    MakeBackend,
    ask,
    grant,
    integrity,
    release,
    request,
)

PROCESSES, TURNS = 4, 40
PATIENCE = 20.0
ENDLESS = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


def test_threads_that_use_an_alias_first_at_the_same_time_share_its_store(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, made, second = make_backend(), list[object](), threading.Event()
    real = table.Store

    def slow_store(*given: Any) -> Any:
        made.append(given)
        if len(made) > 1:
            second.set()
        # Returns at once if another thread also makes a store.
        second.wait(0.3)
        return real(*given)

    monkeypatch.setattr(table, "Store", slow_store)
    stores: list[Any] = []
    threads = [threading.Thread(target=lambda: stores.append(store_of(backend))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(stores) == 3
    assert len(set(map(id, stores))) == 1


def test_a_waiter_gets_its_position_however_fast_others_change_the_row(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast, patient = make_backend(), make_backend(command_timeout=1.0), make_backend()
    held = [grant(patient, request())]
    dialect = store_of(slow).dialect
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
    assert release(patient, held[-1]) == "released"
    assert isinstance(ask(patient, request()), Contention)
    assert isinstance(ask(slow, waiter), Lease)


@pytest.mark.timeout(300)
def test_every_one_of_several_processes_gets_its_share_of_turns(
    project_file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.turns", str(project_file), str(log), str(TURNS)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    try:
        for process in running:
            assert process.stdout.readline() == "ready\n"
        # All others wait before the first one releases, so none gets turns by starting earlier.
        first, *others = running
        print(len(others), file=first.stdin, flush=True)
        assert first.stdout.readline() == "holding\n"
        for process in others:
            print(0, file=process.stdin, flush=True)
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


# -- in memory ---------------------------------------------------------------------------------


def test_g7_interrupts_keep_no_other_thread_from_a_database_in_memory() -> None:
    pool, answers = MemoryPool(), list[Any]()

    def write(one: Connection) -> None:
        with sole_writer(one):
            one.count("UPDATE django_dlock_processrecord SET gone = 0")

    def ask_on_another_thread() -> None:
        def ask() -> None:
            answers.append(pool.run(read, clock.now(), "ordinary"))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    def read(one: Connection) -> Any:
        return one.raw.in_transaction, one.rows("SELECT count(*) FROM django_dlock_processrecord")

    for place in itertools.count(1):
        nth = AtNth(place)
        try:
            sys.setprofile(nth.profile)
            pool.run(write, clock.now() + PATIENCE, "ordinary")
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        ask_on_another_thread()
        if nth.left > 0:
            break
    assert place > 10
    assert answers == [(False, [(0,)])] * place


# -- forks -------------------------------------------------------------------------------------


def test_g8_a_child_does_not_rely_on_the_file_locks_of_its_parent(
    make_backend: MakeBackend, project_file: Path
) -> None:
    backend = make_backend()
    grant(backend, request("before the fork"))
    child = Child(
        lambda: type(ask(backend, request("another"))).__name__,
        lambda: type(ask(backend, request("name"))).__name__,
    )
    assert child.step() == "Lease"
    # If nobody else had the file open, this would remove the write-ahead log of the child.
    backend.close()
    assert isinstance(ask(backend, request("another")), Contention)
    assert child.step() == "Lease"
    assert isinstance(ask(backend, request("name")), Contention)
    child.end()
    assert integrity(project_file) == "ok"


def test_g8_a_fork_waits_for_the_statement_of_another_thread(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may end the statement later than a fork waits.
    monkeypatch.setattr(sqlite_forks, "PATIENCE", PATIENCE)
    backend, under_way, go_on = (
        make_backend(),
        threading.Event(),
        threading.Event(),
    )
    order: list[str] = []

    def use(one: Any, store: Any) -> None:
        under_way.set()
        go_on.wait(PATIENCE)
        order.append("statement")

    def fork() -> None:
        child = Child(lambda: type(ask(backend, request())).__name__)
        order.append("fork")
        assert child.step() == "Lease"
        child.end()

    statement = threading.Thread(target=table_of(backend).call, args=(use, clock.now() + PATIENCE))
    statement.start()
    assert under_way.wait(PATIENCE)
    forker = threading.Thread(target=fork)
    forker.start()
    forker.join(0.2)
    go_on.set()
    statement.join()
    forker.join(PATIENCE)
    assert order == ["statement", "fork"]


def test_g8_a_long_statement_is_interrupted_for_a_fork_and_repeated_after_it(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For as long again, the fork waits until the statement has noticed the interrupt.
    monkeypatch.setattr(sqlite_forks, "PATIENCE", 1.5)
    backend, under_way, attempts = make_backend(), threading.Event(), list[None]()

    def use(one: Any, store: Any) -> Any:
        attempts.append(None)
        if len(attempts) > 1:
            return one.rows("SELECT 1")
        under_way.set()
        return one.rows(ENDLESS)

    answers: list[Any] = []
    statement = threading.Thread(
        target=lambda: answers.append(table_of(backend).call(use, clock.now() + PATIENCE))
    )
    statement.start()
    assert under_way.wait(PATIENCE)
    child = Child(lambda: type(ask(backend, request())).__name__)
    assert child.step() == "Lease"
    child.end()
    statement.join(PATIENCE)
    assert answers == [[(1,)]]


def test_g8_a_child_refuses_a_file_that_was_open_at_its_fork(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_forks, "PATIENCE", 0.0)
    backend = make_backend()

    def refused() -> str:
        try:
            ask(backend, request())
        except BackendRefused as error:
            return str(error)
        return "granted"

    def use(one: Any, store: Any) -> Child:
        return Child(refused)

    child = table_of(backend).call(use, clock.now() + PATIENCE)
    assert "was forked while its parent had the file open" in child.step()
    child.end()
    # The parent goes on.
    assert isinstance(ask(backend, request()), Lease)


def test_fork_hooks_are_registered_once_for_all_backends(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(make_backend(), request("first"))
    registered: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    for number in range(3):
        grant(make_backend(), request(f"other {number}"))
    assert registered == []


@pytest.mark.timeout(300)
def test_g8_increments_are_exact_while_processes_fork(project_file: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-m", "tests.support.forking", str(project_file), str(counter)]
    running = [subprocess.Popen(command) for _ in range(2)]
    try:
        assert [process.wait(250) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert int(counter.read_text()) == 2 * forking.INCREMENTS
    assert integrity(project_file) == "ok"


def test_g8_other_fork_hooks_may_take_locks(project_file: Path) -> None:
    command = [sys.executable, "-c", HOOKS, str(project_file)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["True", "True"]


HOOKS = """
import os, sys
from tests.support.turns import configure
configure(sys.argv[1])
from django_dlock import Lock
os.register_at_fork(before=lambda: print(Lock("before").acquire(timeout=0), flush=True))
pid = os.fork()
if pid == 0:
    print(Lock("in the child").acquire(timeout=0), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
