"""Somebody else's transaction has locked rows, as by an open ``SELECT … FOR UPDATE``."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from django.db import connections, transaction

from django_dlock import Lock, LockError, locks, signals
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.backend import SWEEP_EVERY
from django_dlock.backends.database.rows import Message, Row
from django_dlock.backends.database.statements import Executor
from django_dlock.exceptions import BackendRefused, BackendUnavailable
from django_dlock.lease import Lease, RenewalResult
from django_dlock.process import current
from tests.support import databases
from tests.support.aliases import configured
from tests.support.database_bed import (
    Bed,
    grant,
    release,
    renew,
    renewal_results,
    request,
    store_of,
    table_of,
)

SERVERS = ["postgres", "mariadb"]
"""Those that lock rows; SQLite locks the whole file, for as long as one statement takes."""


@contextmanager
def locked_row(database: str, table: str, column: str, value: str) -> Iterator[None]:
    with transaction.atomic(using=database):
        with connections[database].cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {table} WHERE {column} = %s FOR UPDATE", [value])
            assert cursor.fetchall()
        yield


def leases_of(backend: DatabaseBackend, count: int = 20) -> list[Lease]:
    return [grant(backend, request(f"n{number}", ttl=30.0)) for number in range(count)]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_g1_a_locked_row_keeps_no_other_lease_from_being_renewed(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=5.0)
    leases = leases_of(backend)
    with locked_row(database, "django_dlock_leaserecord", "owner", leases[7].owner):
        results = renewal_results(backend, *leases)
        assert results.pop(7) == RenewalResult("unanswered")
        assert [result.outcome for result in results] == ["renewed"] * (len(leases) - 1)
        infos = {info.name: info.renewals for info in backend.list(prefix="n")}
    assert infos == {lease.name: 0 if lease is leases[7] else 1 for lease in leases}
    assert renewal_results(backend, *leases)[7].ttl == 30.0


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_g1_a_row_that_is_locked_in_the_middle_of_a_renewal_delays_no_other_lease(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks which rows are free ──► one of them is locked ──► it renews
    backend = bed.backend(database, command_timeout=5.0)
    leases = leases_of(backend, 3)
    renew(backend, *leases)
    dialect, lock = store_of(backend).dialect, ExitStack()
    which_are_unlocked = dialect._unlocked

    def then_locked(*args: Any) -> set[str]:
        monkeypatch.undo()
        unlocked = which_are_unlocked(*args)
        row = locked_row(database, "django_dlock_leaserecord", "owner", leases[1].owner)
        lock.enter_context(row)
        return unlocked

    monkeypatch.setattr(dialect, "_unlocked", then_locked)
    with lock:
        outcomes = renew(backend, *leases)
    assert outcomes == ["renewed", "unanswered", "renewed"]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_holder_is_told_that_its_lease_is_in_doubt_while_its_row_is_locked(
    bed: Bed, database: str
) -> None:
    entry = {
        "BACKEND": "django_dlock.backends.database.DatabaseBackend",
        "OPTIONS": {"database": database, "command_timeout": 3.0},
        "KEY_PREFIX": secrets.token_hex(4),
    }
    doubted = threading.Event()

    def receive(sender: object, *, name: str, **facts: object) -> None:
        if name == "one":
            doubted.set()

    signals.in_doubt.connect(receive)
    with configured({"default": entry}):
        try:
            one, other = Lock("one", ttl=9.0), Lock("other", ttl=9.0)
            assert one.acquire()
            assert other.acquire()
            owner = one.owner
            assert owner is not None
            with locked_row(database, "django_dlock_leaserecord", "owner", owner):
                assert doubted.wait(20)
        finally:
            for lock in (one, other):
                with suppress(LockError):
                    lock.release()
            signals.in_doubt.disconnect(receive)
            locks["default"].close()


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_server_that_logs_statements_is_refused_with_the_cure(bed: Bed, database: str) -> None:
    with connections[database].cursor() as cursor:
        cursor.execute("SELECT @@log_bin")
        if not cursor.fetchone()[0]:
            pytest.skip("the server has no binary log")
    changes = {"OPTIONS": {"init_command": "SET SESSION binlog_format = STATEMENT"}}
    settings = {**connections.settings[database], **changes}
    backend = bed.backend(
        bed.stack.enter_context(databases.added("statements", settings)), command_timeout=20.0
    )
    with pytest.raises(BackendRefused, match="set binlog_format to MIXED or ROW"):
        grant(backend, request())


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_lease_of_a_locked_row_that_has_ended_is_reported_as_lost(
    bed: Bed, database: str
) -> None:
    backend = bed.backend(database, command_timeout=5.0)
    leases = leases_of(backend, 3)
    release(backend, leases[1])
    with locked_row(database, "django_dlock_leaserecord", "owner", leases[1].owner):
        assert renew(backend, *leases) == ["renewed", "released", "renewed"]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_the_renewal_of_one_lease_whose_row_is_locked_has_no_answer(
    bed: Bed, database: str
) -> None:
    backend = bed.backend(database, command_timeout=2.0)
    lease = grant(backend, request())
    locked = locked_row(database, "django_dlock_leaserecord", "owner", lease.owner)
    with locked, pytest.raises(BackendUnavailable):
        renew(backend, lease)
    assert renew(backend, lease) == ["renewed"]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_g1_a_locked_heartbeat_keeps_no_lease_from_being_renewed(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=5.0)
    leases = leases_of(backend, 3)
    renew(backend, *leases)
    other = bed.backend(database, command_timeout=5.0)
    leases = leases_of(other, 3)
    with locked_row(database, "django_dlock_processrecord", "id", current().id):
        # A new backend writes a heartbeat with its first renewal.
        assert renew(other, *leases) == ["renewed"] * 3


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_g5_a_sweep_that_is_cut_undoes_no_grant(
    bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sweep gets a quarter of it; the grants must survive a pause of a busy machine.
    backend = bed.backend(database, command_timeout=4.0)
    grant(backend, request("before"))
    cut = []

    def waits(executor: Executor, start: object) -> tuple[int, int]:
        cut.append(start)
        executor.rows("SELECT pg_sleep(60)")
        raise AssertionError("the call was not cut")

    monkeypatch.setattr(type(store_of(backend).dialect), "sweep", lambda _, *args: waits(*args))
    leases = leases_of(backend, SWEEP_EVERY)
    assert len(cut) == 1
    assert len({lease.owner for lease in leases}) == SWEEP_EVERY


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_release_notifies_any_number_of_waiters(bed: Bed, database: str) -> None:
    # A statement may not return more than 1664 columns.
    backend = bed.backend(database, command_timeout=10.0)
    lease = grant(backend, request())

    def end(row: Row, now: int) -> tuple[str, list[Message]]:
        row.ended = "r"
        return "ended", [Message("nobody", f"waiter-{number}", 0) for number in range(2000)]

    assert table_of(backend).change(lease.name, end, backend.call_deadline()) == "ended"
    assert release(backend, lease) == "released"
