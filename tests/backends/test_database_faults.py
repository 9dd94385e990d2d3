"""What the database backend does when the database, the network or the caller misbehaves."""

from __future__ import annotations

import gc
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections, transaction

from django_dlock import clock
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.backend import SWEEP_EVERY
from django_dlock.backends.database.connection import Connection
from django_dlock.backends.database.lease_file import LeaseFile
from django_dlock.exceptions import BackendRefused, BackendUnavailable
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from django_dlock.process import current
from tests.support import databases
from tests.support.database_bed import Bed, ask, grant, release, renew, request, store_of, table_of
from tests.support.increments import THREADS
from tests.support.proxy import Proxy

PROCESSES, TIMES = 4, 20
"""How often each of a process's threads increments the number."""


def grant_patiently(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease:
    """Acquire, where the backend's own timeout is too short for a first connection."""
    answer = backend.acquire(attempt, deadline=clock.now() + 20)
    assert isinstance(answer, Lease), answer
    return answer


# -- mutual exclusion ------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb"])
def test_g1_many_processes_and_threads_increment_a_number_exactly(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "sqlite":
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
    else:
        alias = request.getfixturevalue(f"{kind}_alias")
        entry = connections.settings[alias]
        database = {
            key: entry[key] for key in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
        }
    counter = tmp_path / "counter"
    counter.write_text("0")
    settings = json.dumps(
        {
            "DATABASES": {"default": database},
            "DLOCKS": {
                "default": {
                    "BACKEND": "django_dlock.backends.database.DatabaseBackend",
                    "KEY_PREFIX": secrets.token_hex(4),
                    # Other work may slow the machine down.
                    "OPTIONS": {"command_timeout": 10.0, "outage_patience": 60.0},
                }
            },
        }
    )
    command = [sys.executable, "-m", "tests.support.increments", settings, str(counter)]
    running = [subprocess.Popen([*command, str(TIMES)]) for _ in range(PROCESSES)]
    try:
        assert [process.wait(280) for process in running] == [0] * PROCESSES
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert int(counter.read_text()) == PROCESSES * THREADS * TIMES


def test_g1_a_lease_survives_the_rollback_of_its_caller(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    with transaction.atomic(using=database):
        with connections[database].cursor() as cursor:
            cursor.execute("SELECT 1")
        lease = grant(backend, request())
        transaction.set_rollback(True, using=database)
    assert isinstance(ask(backend, request()), Contention)
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"


def test_waiters_are_served_in_order_of_arrival(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    waiters = [request(waits=True) for _ in range(5)]
    for waiter in waiters:
        assert isinstance(ask(backend, waiter), Contention)
    for waiter in waiters:
        release(backend, lease)
        # No later caller overtakes.
        assert isinstance(ask(backend, request()), Contention)
        lease = grant(backend, waiter)


def test_g1_a_row_that_changed_after_it_was_read_is_not_overwritten(
    bed: Bed, database: str
) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())

    # This uses private names, because no public one stops between reading and writing.
    def use(one: Any, store: Any, key: Any) -> bool:
        now, row = store.dialect.read(one, key)
        before = row.values()
        release(backend, lease)
        grant(backend, request())
        row.renew(Renewal("name", lease.owner, 60.0), now)
        written: bool = store.dialect.write(one, key, before, row, [])
        return written

    assert not table_of(backend).ask(use, "name", clock.now() + 10)
    assert renew(backend, lease) == ["released"]


# -- statements --------------------------------------------------------------------------------


def test_acquire_and_release_are_two_statements_and_an_idle_process_sends_none(
    bed: Bed, postgres_alias: str, postgres_proxy: Proxy
) -> None:
    backend = bed.backend(bed.behind(postgres_proxy, postgres_alias), command_timeout=10.0)
    release(backend, grant(backend, request()))
    before = postgres_proxy.count()
    for _ in range(10):
        release(backend, grant(backend, request()))
    assert postgres_proxy.commands[before:] == ["ACQUIRE", "RELEASE"] * 10
    assert postgres_proxy.connections == 1


def test_a_wait_and_the_release_that_ends_it_are_one_statement_each(
    bed: Bed, postgres_alias: str, postgres_proxy: Proxy
) -> None:
    backend = bed.backend(bed.behind(postgres_proxy, postgres_alias), command_timeout=10.0)
    lease, waiter = grant(backend, request()), request(waits=True)
    before = postgres_proxy.count()
    met = ask(backend, waiter)
    assert postgres_proxy.commands[before] == "ACQUIRE_OR_WAIT"
    wakeup = store_of(backend).wakeup
    assert wakeup is not None
    while not wakeup.subscribed:
        time.sleep(0.001)
    before = postgres_proxy.count()
    assert release(backend, lease) == "released"
    assert postgres_proxy.commands[before:] == ["RELEASE"]
    assert grant(backend, waiter).token > lease.token
    del met


def test_500_leases_are_renewed_by_one_statement(
    bed: Bed, postgres_alias: str, postgres_proxy: Proxy
) -> None:
    backend = bed.backend(bed.behind(postgres_proxy, postgres_alias), command_timeout=10.0)
    leases = [grant(backend, request(f"n{number}")) for number in range(500)]
    before = postgres_proxy.count()
    assert renew(backend, *leases) == ["renewed"] * 500
    assert renew(backend, *leases) == ["renewed"] * 500
    assert postgres_proxy.count() == before + 2


# -- the network -------------------------------------------------------------------------------


def test_g5_a_lost_reply_leaves_no_lease_without_an_owner(
    bed: Bed, postgres_alias: str, postgres_proxy: Proxy
) -> None:
    backend = bed.backend(bed.behind(postgres_proxy, postgres_alias), command_timeout=10.0)
    release(backend, grant(backend, request()))
    postgres_proxy.drop_replies(of=("ACQUIRE",))
    lease = grant(backend, request())
    assert postgres_proxy.replies_dropped == 1
    postgres_proxy.drop_replies(of=("RELEASE",))
    assert release(backend, lease) == "released"
    assert postgres_proxy.replies_dropped == 2
    assert not backend.locked("name", deadline=backend.call_deadline())


@pytest.mark.parametrize("kind", ["postgres", "mariadb", "mysqlclient"])
def test_g10_a_call_into_a_black_hole_returns_by_its_deadline(
    bed: Bed, kind: str, request: pytest.FixtureRequest
) -> None:
    server = "postgres" if kind == "postgres" else "mariadb"
    proxy: Proxy = request.getfixturevalue(f"{server}_proxy")
    alias = bed.behind(proxy, request.getfixturevalue(f"{kind}_alias"))
    backend = bed.backend(alias, command_timeout=0.5)
    lease = grant_patiently(backend, globals()["request"]())
    proxy.black_hole()
    # The second one needs a new connection.
    for _ in range(2):
        began = clock.now()
        with pytest.raises(BackendUnavailable):
            release(backend, lease)
        # Much less than any driver's own timeout, but a busy machine may add some seconds.
        assert clock.now() - began < 5.0
    proxy.heal()
    patient = clock.now() + 10
    assert backend.release(lease.name, lease.owner, min_hold=0.0, deadline=patient) == "released"


def test_a_terminated_session_is_replaced_and_no_lease_is_lost(
    bed: Bed, postgres_alias: str
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=10.0)
    lease = grant(backend, request())
    with connections[postgres_alias].cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert cursor.fetchone()[0] >= 1
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"


def test_a_session_that_mariadb_ended_is_replaced(bed: Bed, mariadb_alias: str) -> None:
    backend = bed.backend(mariadb_alias, command_timeout=10.0)
    lease = grant(backend, request())
    with connections[mariadb_alias].cursor() as cursor:
        cursor.execute(
            "SELECT id FROM information_schema.processlist "
            "WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        )
        for (session,) in cursor.fetchall():
            cursor.execute(f"KILL {session}")
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"


# -- the database ------------------------------------------------------------------------------


def test_the_error_for_a_missing_table_names_the_command_to_run(
    bed: Bed, postgres_url: str, postgres_alias: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA empty")
    changes = {"OPTIONS": {"options": "-c search_path=empty"}}
    settings = {**connections.settings[postgres_alias], **changes}
    bed.stack.enter_context(databases.added("unmigrated", settings))
    backend = bed.backend("unmigrated", command_timeout=10.0)
    with pytest.raises(BackendRefused, match="migrate django_dlock --database unmigrated"):
        ask(backend, request())
    assert [problem.id for problem in backend.store_problems()] == ["E010"]


def test_the_error_for_a_read_only_database_says_so(bed: Bed, postgres_alias: str) -> None:
    changes = {"OPTIONS": {"options": "-c default_transaction_read_only=on"}}
    settings = {**connections.settings[postgres_alias], **changes}
    bed.stack.enter_context(databases.added("standby", settings))
    # A refused call is repeated until its deadline. A first connection may take longer.
    backend = bed.backend("standby", command_timeout=1.0)
    assert not backend.locked("name", deadline=clock.now() + 20)
    with pytest.raises(BackendUnavailable, match="is read-only"):
        ask(backend, request())
    assert [problem.id for problem in backend.store_problems()] == ["E011"]


def test_g2_deleted_rows_are_reported_and_tokens_still_rise(bed: Bed, database: str) -> None:
    if connections[database].vendor == "sqlite":
        pytest.skip("SQLite keeps the rows in a separate file")
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    with connections[database].cursor() as cursor:
        cursor.execute("DELETE FROM django_dlock_leaserecord")
    assert renew(backend, lease) == ["refused"]
    assert grant(backend, request()).token > lease.token


@pytest.mark.parametrize("database", ["postgres", "mariadb", "mysqlclient"], indirect=True)
def test_g10_a_row_that_is_locked_makes_the_call_fail_in_time(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=0.5)
    lease = grant_patiently(backend, request())
    with transaction.atomic(using=database):
        with connections[database].cursor() as cursor:
            cursor.execute("SELECT 1 FROM django_dlock_leaserecord FOR UPDATE")
        began = clock.now()
        for call in (partial(release, backend, lease), partial(ask, backend, request())):
            with pytest.raises(BackendUnavailable):
                call()
        # The servers' own limits are 50 seconds, or none.
        assert clock.now() - began < 10.0
        # The server does not go on with it.
        databases.until(lambda: not databases.waits(database))
    patient = clock.now() + 10
    assert backend.release(lease.name, lease.owner, min_hold=0.0, deadline=patient) == "released"


@pytest.mark.parametrize("database", ["postgres", "mariadb", "mysqlclient"], indirect=True)
def test_g10_a_statement_that_the_server_does_not_end_is_cut(bed: Bed, database: str) -> None:
    # The driver's own timeout must not be what ends it.
    changes = {} if database == "postgres" else {"OPTIONS": {"read_timeout": 60}}
    settings = {**connections.settings[database], **changes}
    bed.stack.enter_context(databases.added("patient", settings))
    backend = bed.backend("patient", command_timeout=0.5)
    assert not backend.locked("name", deadline=clock.now() + 20)
    sleeps = "pg_sleep" if database == "postgres" else "SLEEP"
    begun: list[float] = []

    def use(one: Connection, _: object) -> list[tuple[Any, ...]]:
        begun.append(clock.now())
        # The limit that the server is told.
        one.deadline = clock.now() + 60
        return one.rows(f"SELECT {sleeps}(60)")

    with pytest.raises(BackendUnavailable):
        table_of(backend).call(use, backend.call_deadline())
    assert clock.now() - begun[0] < 30.0


def test_g2_a_broken_lease_is_reported_though_its_name_is_renewed_for_another(
    bed: Bed, database: str
) -> None:
    # Both holders may be threads of one process, whose leases are renewed together.
    backend = bed.backend(database, command_timeout=5.0)
    broken = grant(backend, request())
    assert backend.break_silently("name", owner=broken.owner)
    other = grant(backend, request())
    assert renew(backend, broken, other) == ["broken", "renewed"]
    assert renew(backend, other, broken) == ["renewed", "broken"]


# -- processes ---------------------------------------------------------------------------------


def test_g8_the_end_of_a_child_does_not_end_its_parents_sessions(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())
    # Files of SQLite are closed before a fork.
    has_sessions = connections[database].vendor != "sqlite"
    session = session_of(backend) if has_sessions else None
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            backend.after_fork()
            gc.collect()
            backend.close()
            status = 0 if backend.locked("name", deadline=clock.now() + 10) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert renew(backend, lease) == ["renewed"]
    # Not through a new connection.
    assert not has_sessions or session_of(backend) is session


def session_of(backend: DatabaseBackend) -> Any:
    """The driver's connection that the next call uses."""
    return table_of(backend).call(lambda one, _: one.raw, backend.call_deadline())


def test_renewals_do_not_wait_behind_acquires(bed: Bed, postgres_alias: str) -> None:
    backend = bed.backend(postgres_alias, connections=3, command_timeout=5.0)
    lease = grant(backend, request("mine"))
    other = grant(backend, request("locked"))
    with transaction.atomic(using=postgres_alias):
        with connections[postgres_alias].cursor() as cursor:
            cursor.execute(
                "SELECT 1 FROM django_dlock_leaserecord WHERE name = 'locked' FOR UPDATE"
            )
        stuck = [threading.Thread(target=ask, args=(backend, request("locked"))) for _ in range(4)]
        for thread in stuck:
            thread.start()
        databases.wait_until_one_waits(postgres_alias)
        began = time.monotonic()
        assert renew(backend, lease) == ["renewed"]
        assert release(backend, lease) == "released"
        assert time.monotonic() - began < 4.0
    for thread in stuck:
        thread.join()
    release(backend, other)


# -- a database in memory ----------------------------------------------------------------------


def test_many_callers_may_acquire_a_new_name_at_once(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=10.0)
    answers: list[Any] = []
    together = threading.Barrier(4)

    def work() -> None:
        for number in range(10):
            together.wait(60)
            try:
                answers.append(ask(backend, request(f"new:{number}")))
            except Exception as error:
                answers.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    wrong = [it for it in answers if isinstance(it, Exception)]
    assert not wrong, wrong
    assert Counter(map(type, answers)) == {Lease: 10, Contention: 30}


def test_all_links_to_the_projects_file_share_one_file_of_leases(tmp_path: Path) -> None:
    (tmp_path / "shared.sqlite3").touch()
    for release_name in ("one", "two"):
        (tmp_path / release_name).mkdir()
        (tmp_path / release_name / "db.sqlite3").symlink_to(tmp_path / "shared.sqlite3")
    paths = {LeaseFile(tmp_path / name / "db.sqlite3").path for name in ("one", "two")}
    assert len(paths) == 1


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_names_used_once_are_swept_if_every_acquire_reads_the_row(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[object] = []
    backend = bed.backend(database, command_timeout=10.0)

    def sweep(_: object, one: object, start: object) -> tuple[int, int]:
        swept.append(start)
        return 1, 0

    monkeypatch.setattr(type(store_of(backend).dialect), "sweep", sweep)
    for number in range(2 * SWEEP_EVERY):
        grant(backend, request(f"once:{number}"))
    assert len(swept) == 2


def test_locks_of_a_database_in_memory_belong_to_this_process(bed: Bed) -> None:
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    bed.stack.enter_context(databases.added("memory", settings))
    backend = bed.backend("memory", command_timeout=10.0)
    assert not backend.is_shared
    lease = grant(backend, request())
    backend.close()
    assert renew(backend, lease) == ["renewed"]


def test_a_test_run_does_not_touch_the_projects_own_database(bed: Bed, tmp_path: Path) -> None:
    names = {name: tmp_path / f"{name}.sqlite3" for name in ("project", "test")}
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": names["test"]}
    alias = bed.stack.enter_context(databases.added("changing", settings))
    backend = bed.backend(alias, command_timeout=10.0)
    release(backend, grant(backend, request()))
    # As at the end of a test run, before the process ends.
    connections.settings[alias]["NAME"] = names["project"]
    assert renew(backend) == []
    backend.deregister(current().id, deadline=backend.call_deadline())
    assert sorted(path.name for path in tmp_path.glob("*-dlock")) == ["test.sqlite3-dlock"]
