"""What an operator of a database does to it: settings, locks, ended and stopped sessions, edits."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connections, transaction

from django_dlock import Lock
from django_dlock.backends.database import DatabaseBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease, ReleaseRequest
from tests.support import databases
from tests.support.aliases import configured
from tests.support.database_bed import Bed, ask, grant, release, renew, request, store_of, table_of

LEASES = "django_dlock_leaserecord"


def execute(alias: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, values)
        return list(cursor.fetchall()) if cursor.description else []


def with_options(bed: Bed, alias: str, **options: str) -> str:
    """An alias of the same database, with these ``OPTIONS``."""
    settings = {**connections.settings[alias], "OPTIONS": options}
    return bed.stack.enter_context(databases.added(f"{alias}-set", settings))


@contextmanager
def locked(alias: str, lease: Lease) -> Iterator[None]:
    with transaction.atomic(using=alias):
        assert execute(alias, f"SELECT 1 FROM {LEASES} WHERE owner = %s FOR UPDATE", lease.owner)
        yield


# -- the project's settings -------------------------------------------------------------------


def test_a_statement_that_a_timeout_of_the_projects_ended_is_repeated(
    bed: Bed, postgres_alias: str
) -> None:
    alias = with_options(bed, postgres_alias, options="-c lock_timeout=50ms")
    backend = bed.backend(alias, command_timeout=20.0)
    lease = grant(backend, request())
    repeated = threading.Event()
    use = store_of(backend).dialect.release

    def counting(*args: Any) -> bool:
        if attempts:
            repeated.set()
        attempts.append(args)
        return use(*args)

    attempts: list[Any] = []
    with ThreadPoolExecutor() as pool:
        with locked(postgres_alias, lease), pytest.MonkeyPatch.context() as patches:
            patches.setattr(store_of(backend).dialect, "release", counting)
            call = pool.submit(release, backend, lease)
            assert repeated.wait(20)
        assert call.result() == "released"


def test_a_session_that_mariadb_closed_for_idleness_is_replaced(
    bed: Bed, mariadb_alias: str
) -> None:
    alias = with_options(bed, mariadb_alias, init_command="SET SESSION wait_timeout = 1")
    backend = bed.backend(alias, command_timeout=5.0)
    lease = grant(backend, request())
    ((session,),) = ask_session(backend, "SELECT CONNECTION_ID()")
    statement = "SELECT 1 FROM information_schema.processlist WHERE id = %s"
    databases.until(lambda: not execute(mariadb_alias, statement, session))
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"


def ask_session(backend: DatabaseBackend, statement: str) -> list[tuple[Any, ...]]:
    """An answer from the session that the next call will use."""
    # A private name, because no public call says which session it uses.
    return table_of(backend).call(lambda one, store: one.rows(statement), backend.call_deadline())


# -- locks and sessions ------------------------------------------------------------------------


def test_the_victim_of_a_deadlock_repeats_its_statement(
    bed: Bed, postgres_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=30.0)
    attempts: list[object] = []
    release_many = store_of(backend).dialect.release_many

    def counting(*args: Any) -> Any:
        attempts.append(args)
        return release_many(*args)

    monkeypatch.setattr(store_of(backend).dialect, "release_many", counting)
    give_up_at = time.monotonic() + 60
    with ThreadPoolExecutor() as pool:
        # The server chooses which row the statement locks first, and which of the two transactions
        # is the victim: go on until it was the statement of the backend.
        for order in itertools.cycle((1, -1)):
            attempts.clear()
            leases = [grant(backend, request(f"n{number}")) for number in range(2)]
            releases = [ReleaseRequest(lease.name, lease.owner) for lease in leases]
            first, second = leases[::order]
            deadline = backend.call_deadline()
            try:
                with locked(postgres_alias, first):
                    call = pool.submit(backend.release_many, releases, deadline=deadline)
                    databases.wait_until_one_waits(postgres_alias)
                    statement = f"SELECT 1 FROM {LEASES} WHERE owner = %s FOR UPDATE"
                    execute(postgres_alias, statement, second.owner)
            except OperationalError as error:
                if "deadlock detected" not in str(error):
                    raise
            assert call.result() == ["released", "released"]
            if len(attempts) > 1:
                break
            assert time.monotonic() < give_up_at


def test_g1_what_a_stopped_session_executes_late_changes_no_later_lease(
    bed: Bed, postgres_alias: str
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=2.0)
    lease = grant(backend, request())
    ((pid,),) = ask_session(backend, "SELECT pg_backend_pid()")
    try:
        os.kill(pid, signal.SIGSTOP)
    except (PermissionError, ProcessLookupError):
        pytest.skip("the server is another user's or another machine's")
    try:
        with pytest.raises(BackendUnavailable):
            release(backend, lease)
        # Through a new session.
        assert release(backend, lease) == "released"
        other = grant(backend, request())
    finally:
        os.kill(pid, signal.SIGCONT)
    statement = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
    databases.until(lambda: not execute(postgres_alias, statement, pid))
    assert renew(backend, other) == ["renewed"]
    assert isinstance(ask(backend, request()), Contention)


# -- edits -------------------------------------------------------------------------------------

EDITS: dict[str, tuple[str, list[str]]] = {
    "given to another": ("owner = 'another'", ["refused"]),
    "ended": ("ended = 'b'", ["broken"]),
    "expired": ("ends_at = 1", ["expired"]),
    "a queue that is no JSON": ("queue = 'garbage'", ["renewed"]),
    "a queue of another shape": ("queue = '[[1, 2], {}]'", ["renewed"]),
    "a process that is no JSON": ("process = '{'", ["renewed"]),
    "a past that is none": ("past = 'garbage'", ["renewed"]),
    "cancelled attempts that are none": ("cancelled = 'x y z'", ["renewed"]),
    "metadata that is no JSON": ("metadata = '['", ["renewed"]),
}


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("edit", EDITS)
def test_g2_an_edited_row_is_reported_or_does_no_harm(bed: Bed, database: str, edit: str) -> None:
    assignment, outcomes = EDITS[edit]
    backend = bed.backend(database, command_timeout=5.0)
    lease = grant(backend, request())
    execute(database, f"UPDATE {LEASES} SET {assignment} WHERE owner = %s", lease.owner)
    assert renew(backend, lease) == outcomes
    info = backend.get("name")
    if info is not None:
        assert isinstance(ask(backend, request(waits=True)), Contention)
        assert backend.break_silently("name", owner=info.owner)
        # The waiter was handed the lease.
        waiter = backend.get("name")
        assert waiter is not None
        assert backend.break_silently("name", owner=waiter.owner)
    assert grant(backend, request()).token > lease.token


# -- the caller --------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
def test_a_caller_in_a_broken_transaction_can_acquire_and_release(bed: Bed, database: str) -> None:
    entry = {
        "BACKEND": "django_dlock.backends.database.DatabaseBackend",
        "OPTIONS": {"database": database, "command_timeout": 5.0},
    }
    with configured({"default": entry}), pytest.raises(DatabaseError):  # noqa: SIM117
        with transaction.atomic(using=database):
            try:
                execute(database, "SELECT no_such_column")
            finally:
                lock = Lock("name", bound=False)
                assert lock.acquire(blocking=False)
                assert not Lock("name", bound=False).acquire(blocking=False)
                lock.release()
                assert not lock.locked()
