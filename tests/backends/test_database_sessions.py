"""Only the end of its session at PostgreSQL proves a process dead."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest

from django_dlock import process
from django_dlock.backends.database import sessions
from django_dlock.backends.database.sessions import SessionProof
from django_dlock.backends.database.wakeup import Wakeup
from django_dlock.process import ProcessIdentity
from django_dlock.testing import FakeClock
from tests.support.pgbouncer import PgBouncer

PATIENCE = 20.0
NAME = "dlock holds"
PROCESSES = "django_dlock_processrecord"


class Database:
    def __init__(self, url: str) -> None:
        self.url = url
        self._connection = psycopg.connect(url, autocommit=True)
        self.close = self._connection.close

    def ask(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else []

    def claims(self) -> list[str]:
        found = self.ask(f"SELECT id FROM {PROCESSES} WHERE id LIKE %s", ["session:%"])
        return [claim for (claim,) in found]

    def sessions(self) -> list[int]:
        found = self.ask("SELECT pid FROM pg_stat_activity WHERE application_name = %s", [NAME])
        return [pid for (pid,) in found]

    def beat(self, identity: ProcessIdentity) -> None:
        self.ask(
            f"INSERT INTO {PROCESSES} VALUES (%s, 1, false) "
            f"ON CONFLICT (id) DO UPDATE SET seen_at = {PROCESSES}.seen_at + 1",
            [identity.id],
        )


@pytest.fixture
def database(postgres_url: str, postgres_alias: str) -> Iterator[Database]:
    with closing(Database(postgres_url)) as it:
        yield it
        it.ask(f"DELETE FROM {PROCESSES}")


class Observer:
    """Another process, which checks when it is told to."""

    def __init__(self, database: Database) -> None:
        self._proof, self._clock = SessionProof(database.ask), FakeClock()

    def checks(self, holder: ProcessIdentity) -> bool:
        """Whether, a moment later, it considers the holder dead."""
        with self._clock:
            self._proof.is_dead(holder)
            self._clock.advance(0.5)
            self._proof.check()
            return self._proof.is_dead(holder)

    def believes(self, holder: ProcessIdentity) -> bool:
        return [self.checks(holder) for _ in range(14)][-1]


@pytest.fixture
def observer(database: Database) -> Observer:
    return Observer(database)


Start = Callable[..., tuple[int, ProcessIdentity]]


@pytest.fixture
def start(database: Database) -> Iterator[Start]:
    """Starts a process that listens; waits until listening works or has failed."""
    pids: list[int] = []

    def start(url: str = database.url, name: str = NAME) -> tuple[int, ProcessIdentity]:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                _hold(url, name, write)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        os.close(write)
        pids.append(pid)
        with os.fdopen(read) as told:
            known = told.readline().strip()
            assert known, "it ended before it listened"
            return pid, process.current()._replace(id=known, pid=pid)

    yield start
    for pid in pids:
        kill(pid)
    until(lambda: not database.sessions())


def _hold(url: str, name: str, told: int) -> None:
    ordinary = Database(url)
    wakeup = Wakeup(
        partial(psycopg.connect, url, autocommit=True, application_name=name),
        lambda *values: ordinary.ask("SELECT pg_notify(%s, %s)", values) and None,
        session=SessionProof(ordinary.ask),
    )
    signal.signal(signal.SIGTERM, lambda *_: wakeup.close())
    wakeup.keep_listening()
    until(lambda: wakeup.subscribed or not wakeup.works)
    os.write(told, process.current().id.encode() + b"\n")
    os.close(told)
    while True:
        signal.pause()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def until(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def test_g4_a_killed_process_is_proven_dead_by_the_end_of_its_session(start, database, observer):
    pid, holder = start()
    database.beat(holder)
    assert not observer.believes(holder)
    kill(pid)
    until(lambda: not database.sessions())
    assert observer.believes(holder)
    # Listings of locks show it, too.
    gone = database.ask(f"SELECT gone FROM {PROCESSES} WHERE id = %s", [holder.id])
    assert gone == [(True,)]


def test_g1_a_stopped_process_keeps_its_session(start, observer):
    pid, holder = start()
    os.kill(pid, signal.SIGSTOP)
    assert not observer.believes(holder)


def test_g1_a_living_process_whose_session_was_ended_claims_again(start, database, observer):
    _, holder = start()
    (session,) = database.sessions()
    assert not observer.checks(holder)
    database.ask("SELECT pg_terminate_backend(%s, 10000)", [session])
    assert not observer.checks(holder)
    until(lambda: database.sessions() and database.claims())
    assert not observer.believes(holder)


def test_g1_a_process_that_stops_listening_withdraws_its_claim(start, database, observer):
    pid, holder = start()
    assert database.claims()
    os.kill(pid, signal.SIGTERM)
    until(lambda: not database.sessions())
    assert database.claims() == []
    assert not observer.believes(holder)


def test_g1_a_heartbeat_after_the_end_of_a_session_proves_life(start, database, observer):
    pid, holder = start()
    kill(pid)
    until(lambda: not database.sessions())
    for _ in range(20):
        # Another thread of the process, which has its own connection.
        database.beat(holder)
        assert not observer.checks(holder)
    assert observer.believes(holder)


def test_g1_a_claim_from_before_a_restart_of_the_server_proves_nothing(start, database, observer):
    pid, holder = start()
    kill(pid)
    until(lambda: not database.sessions())
    # A claim ends with the time of the server's start.
    database.ask(f"UPDATE {PROCESSES} SET id = id || '1' WHERE id LIKE %s", ["session:%"])
    assert database.claims()
    assert not observer.believes(holder)


def test_g1_a_new_claim_of_the_process_voids_the_proof_of_its_death(start, database, observer):
    pid, holder = start()
    kill(pid)
    until(lambda: not database.sessions())
    assert observer.believes(holder)
    database.beat(holder)
    assert not observer.checks(holder)


def test_g1_nothing_is_claimed_through_a_pooler_that_shares_sessions(
    start, database, observer, pooler: PgBouncer
):
    # The pooler keeps its own connection.
    pid, holder = start(pooler.url_for(database.url), name="pooled")
    assert database.claims() == []
    kill(pid)
    assert not observer.believes(holder)


def test_g1_a_failed_check_proves_nothing(start, database, observer, monkeypatch):
    pid, holder = start()
    kill(pid)
    until(lambda: not database.sessions())
    assert not observer.checks(holder)
    monkeypatch.setattr(sessions, "FIND_DEAD", "SELECT 1 / 0, %s, %s")
    assert not observer.believes(holder)
