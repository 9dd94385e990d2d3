"""PostgreSQL's statements that decide in one round trip what ``Row`` decides elsewhere."""

from __future__ import annotations

import copy
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from django.db import connections, transaction

from django_dlock import clock
from django_dlock.backends.database import DatabaseBackend, postgresql
from django_dlock.backends.database.connection import Connection
from django_dlock.backends.database.memory import LONG
from django_dlock.backends.database.postgresql_connection import BY_INDEX
from django_dlock.backends.database.rows import SECOND, Row
from django_dlock.backends.database.store import Store
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Contention, Lease, LeaseRequest
from django_dlock.process import current
from tests.support import databases, postgres
from tests.support.database_bed import Bed, ask, grant, release, request, store_of, table_of
from tests.support.pgbouncer import PgBouncer

ME, OTHER, CHANNEL = "a" * 32, "b" * 32, "dlock_channel"
PROCESS, METADATA = json.dumps({"id": 'p"1\\'}), json.dumps({"user": "Zoë\t\n'x'"})


def asked(owner: str, **kwargs: Any) -> LeaseRequest:
    return LeaseRequest("name", owner, 30.0, metadata=METADATA, **kwargs)


def held(now: int, owner: str = OTHER) -> Row:
    row = Row(version=7, token=5)
    row.acquire(asked(owner), now, PROCESS, "")
    return row


def waited_for(now: int, owner: str = OTHER, until: int = 0) -> Row:
    row = held(now - 60 * SECOND, owner)
    for number, channel in enumerate((CHANNEL, "", CHANNEL)):
        kind = "parked" if number == 1 else "held"
        waiter = asked(f"waiter{number}", waits=True, kind=kind)
        row.acquire(waiter, now - 50 * SECOND, PROCESS, channel)
    row.ends_at = now + 20 * SECOND
    row.ttl = 80 * SECOND
    tickets = [ticket._replace(until=now + 9 * SECOND) for ticket in row.tickets(0)]
    row.queue = "".join(ticket.line for ticket in tickets)
    return row


def changed(row: Row, **columns: Any) -> Row:
    for column, value in columns.items():
        setattr(row, column, value)
    return row


def released(now: int) -> Row:
    row = held(now)
    row.release(OTHER, 0.0, now)
    return row


def cooling(now: int) -> Row:
    row = held(now)
    row.release(OTHER, 20.0, now)
    return row


def first_is_late(now: int, owner: str = OTHER) -> Row:
    row = waited_for(now, owner)
    first, *others = row.tickets(0)
    late = first._replace(until=now - SECOND)
    return changed(row, queue="".join(ticket.line for ticket in (late, *others)))


def damaged(now: int, owner: str = OTHER) -> Row:
    return changed(waited_for(now, owner), queue="not a ticket\n")


States = dict[str, Callable[[int], Row]]
DECIDED: States = {
    "held": held,
    "waited for": waited_for,
    "waited for, but the first is late": first_is_late,
    "released": released,
    "expired": lambda now: changed(held(now), ends_at=now - SECOND),
    "cooling": cooling,
    "cooled": lambda now: changed(cooling(now), ends_at=now - SECOND),
    "broken": lambda now: changed(held(now), ended="b"),
    "handed over": lambda now: changed(held(now), renewals=-1),
    "held, and its memory is full": lambda now: changed(held(now), past="r" * LONG),
}
LEFT_TO_ROW: States = {
    "mine": lambda now: held(now, ME),
    "I wait": lambda now: changed(
        waited_for(now), queue=waited_for(now).queue.replace("waiter1", ME)
    ),
    "mine before": lambda now: changed(released(now), past=f"e{ME}\n"),
    "cancelled": lambda now: changed(released(now), cancelled=f"{now + SECOND} {ME}\n"),
    "free, but somebody waits": lambda now: changed(waited_for(now), ended="r"),
    "its memory is full": lambda now: changed(released(now), past="r" * LONG),
    "the last ticket is incomplete": lambda now: changed(waited_for(now), queue="not a ticket"),
    "the clock was set back": lambda now: changed(held(now), ends_at=now + 99 * SECOND),
}


def in_table(
    backend: DatabaseBackend, make: Callable[[int], Row], use: Callable[[Any, Any, Any], Any]
) -> tuple[int, Row, Any, Row]:
    """Store a row and use it; return the time, the row before, the answer and the row after."""

    def run(one: Connection, store: Store, key: Any) -> tuple[int, Row, Any, Row]:
        now, _, _ = store.dialect.read_or_new(one, key)
        row = make(now)
        assert store.dialect.insert(one, key, table_of(backend).names("name"), row, [])
        answer = use(one, store, key)
        after = store.dialect.read(one, key)[1]
        assert after is not None
        return now, row, answer, after

    return table_of(backend).ask(run, "name", clock.now() + 60.0)


def assert_same(row: Row, expected: Row, now: int) -> None:
    """They are equal, but for the time at which the statement ran."""
    # Tickets that are over may stay.
    mine, theirs = row.tickets(now), expected.tickets(now)
    assert [ticket[:6] for ticket in mine] == [ticket[:6] for ticket in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert_near(one.until, other.until)
        assert_near(one.since, other.since)
    for name in ("token", "granted_at", "ends_at"):
        assert_near(getattr(row, name), getattr(expected, name))
    equal = [
        name
        for name in postgresql.COLUMNS
        if name not in ("token", "granted_at", "ends_at", "queue")
    ]
    assert {it: getattr(row, it) for it in equal} == {it: getattr(expected, it) for it in equal}


def assert_near(moment: int, other: int) -> None:
    # Busy machines need some seconds between the statements.
    assert abs(moment - other) < 30 * SECOND


@pytest.mark.parametrize("state", [*DECIDED, *LEFT_TO_ROW])
@pytest.mark.parametrize("waits", [True, False])
def test_an_acquire_in_one_statement_does_what_a_row_does(
    bed: Bed, postgres_alias: str, state: str, waits: bool
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    attempt = asked(ME, waits=waits)

    def use(one: Any, store: Any, key: Any) -> Any:
        values = (ME, "held", 30 * SECOND, PROCESS, METADATA)
        names = table_of(backend).names("name")
        return store.dialect.acquire(one, key, names, values, CHANNEL if waits else None)

    make = {**DECIDED, **LEFT_TO_ROW}[state]
    now, before, answer, after = in_table(backend, make, use)
    expected = copy.copy(before)
    granted, messages = expected.acquire(attempt, now, PROCESS, CHANNEL)
    assert not messages or state in LEFT_TO_ROW
    if state in LEFT_TO_ROW or not (waits or granted):
        assert answer == 0
        assert after == before
        return
    expected.version += 1
    assert_same(after, expected, now)
    if granted:
        assert answer == after.token > before.token
    else:
        assert answer[1:] == (after, False)


RELEASED: States = {
    "held": lambda now: held(now, ME),
    "waited for": lambda now: waited_for(now, ME),
    "held, and its memory is full": lambda now: changed(held(now, ME), past="r" * LONG),
}
RELEASED_BY_ROW: States = {
    "the first waiter is late": lambda now: first_is_late(now, ME),
    "damaged": lambda now: damaged(now, ME),
    "waited for, and its memory is full": lambda now: changed(waited_for(now, ME), past="r" * LONG),
    "another's": waited_for,
    "expired": lambda now: changed(held(now, ME), ends_at=now - SECOND),
    "broken": lambda now: changed(held(now, ME), ended="b"),
    "cooling": lambda now: changed(held(now, ME), kind="cooling"),
}


@pytest.mark.parametrize("state", [*RELEASED, *RELEASED_BY_ROW])
def test_a_release_in_one_statement_does_what_a_row_does(
    bed: Bed, postgres_alias: str, state: str
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    make = {**RELEASED, **RELEASED_BY_ROW}[state]
    now, before, answer, after = in_table(
        backend, make, lambda one, store, key: store.dialect.release(one, key, ME, "key")
    )
    if state in RELEASED_BY_ROW:
        assert answer is None
        assert after == before
        return
    expected = copy.copy(before)
    assert expected.release(ME, 0.0, now)[0] == "released"
    expected.version += 1
    assert_same(after, expected, now)
    assert answer == (("waiter0", PROCESS) if before.queue else ("", PROCESS))


@pytest.mark.parametrize("damage", ["no tickets at all", "[]\n", "o\tx\theld\t{}\t{}\tc\t9\t9\n"])
def test_a_lease_whose_queue_is_damaged_is_released(
    bed: Bed, postgres_alias: str, damage: str
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    lease = grant(backend, request())
    with connections[postgres_alias].cursor() as cursor:
        statement = "UPDATE django_dlock_leaserecord SET queue = %s WHERE owner = %s"
        cursor.execute(statement, [damage, lease.owner])
    assert release(backend, lease) == "released"
    assert grant(backend, request()).token > lease.token


def test_g4_a_dead_waiter_to_which_a_release_hands_over_is_passed_over(
    bed: Bed, postgres_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    lease = grant(backend, request())
    waiters = [request(waits=True, ttl=600.0) for _ in range(2)]
    with monkeypatch.context() as patches:
        # A process of this machine that does not exist.
        dead = current()._replace(pid=2**22 + 1, id=secrets.token_hex(8))
        patches.setattr("django_dlock.backends.database.backend.current", lambda: dead)
        ask(backend, waiters[0])
    ask(backend, waiters[1])
    assert release(backend, lease) == "released"
    info = backend.get("name")
    assert info is not None
    assert info.owner == waiters[1].owner


# -- waits for locks -------------------------------------------------------------------------


@pytest.mark.parametrize("lock", ["row", "table"])
def test_g10_a_call_at_its_deadline_leaves_no_statement_that_waits_at_the_server(
    bed: Bed, postgres_alias: str, lock: str
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=0.5)
    # A first connection may take longer.
    lease = backend.acquire(request(), deadline=clock.now() + 20.0)
    assert isinstance(lease, Lease)
    with transaction.atomic(using=postgres_alias), connections[postgres_alias].cursor() as cursor:
        if lock == "row":
            row = "SELECT 1 FROM django_dlock_leaserecord WHERE owner = %s FOR UPDATE"
            cursor.execute(row, [lease.owner])
        else:
            cursor.execute("LOCK TABLE django_dlock_leaserecord IN ACCESS EXCLUSIVE MODE")
        for call in (lambda: release(backend, lease), lambda: ask(backend, request(waits=True))):
            with pytest.raises(BackendUnavailable):
                call()
        # The server ends the statement at the same time as the caller gives up.
        databases.until(lambda: not waiting(cursor), 5.0)
    assert backend.locked("name", deadline=clock.now() + 20.0)
    assert backend.release("name", lease.owner, min_hold=0.0, deadline=clock.now() + 20.0)


def test_g10_a_statement_that_waits_in_line_for_a_row_ends_at_its_deadline(
    bed: Bed, postgres_alias: str
) -> None:
    # It waits for two locks: first for its turn, then for the transaction that has locked the row.
    patience = 5.0
    backend = bed.backend(postgres_alias, command_timeout=patience)
    lease = grant(backend, request())
    failed: list[BaseException] = []

    def call() -> None:
        try:
            ask(backend, request(waits=True))
        except BaseException as error:
            failed.append(error)

    with transaction.atomic(using=postgres_alias), connections[postgres_alias].cursor() as cursor:
        row = "SELECT 1 FROM django_dlock_leaserecord WHERE owner = %s FOR UPDATE"
        cursor.execute(row, [lease.owner])
        threads = [threading.Thread(target=call) for _ in range(2)]
        threads[0].start()
        databases.until(lambda: longest_wait(cursor) > patience / 4, 30.0)
        threads[1].start()
        longest = 0.0
        for thread in threads:
            while thread.is_alive() or waiting(cursor):
                longest = max(longest, longest_wait(cursor))
                thread.join(0.02)
    assert len(failed) == 2
    # A busy machine may add two seconds, but not as much as a second wait of its own.
    assert longest < 1.45 * patience


def test_g4_a_waiter_whose_statement_waits_until_the_lease_has_ended_gets_the_name(
    bed: Bed, postgres_alias: str
) -> None:
    # Otherwise its ticket stays in the queue, and the next request hands the lease to nobody.
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    lease = grant(backend, request(ttl=2.0))
    answers: list[Lease | Contention] = []
    waiter = threading.Thread(target=lambda: answers.append(ask(backend, request(waits=True))))
    with transaction.atomic(using=postgres_alias), connections[postgres_alias].cursor() as cursor:
        row = "SELECT 1 FROM django_dlock_leaserecord WHERE owner = %s FOR UPDATE"
        cursor.execute(row, [lease.owner])
        waiter.start()
        databases.until(lambda: waiting(cursor) > 0, 20.0)
        databases.until(lambda: not backend.locked("name", deadline=clock.now() + 20.0), 20.0)
        ended = clock.now()
    waiter.join()
    answer = answers[0]
    assert isinstance(answer, Lease)
    # Otherwise a short lease could be over here when it is granted.
    assert answer.asked_at > ended


def longest_wait(cursor: Any) -> float:
    """For how long a statement that waits for a lock has been at the server."""
    # Otherwise the view stays the same for the whole transaction.
    cursor.execute("SELECT pg_stat_clear_snapshot()")
    cursor.execute(
        "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - query_start)), 0) "
        "FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    )
    return float(cursor.fetchone()[0])


def waiting(cursor: Any) -> int:
    cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
    return int(cursor.fetchone()[0])


# -- prepared statements -----------------------------------------------------------------------


def test_sessions_of_a_pooler_are_shared_and_keep_their_settings(
    bed: Bed, postgres_alias: str, postgres_url: str, pooler: PgBouncer
) -> None:
    settings = postgres.settings_for(pooler.url_for(postgres_url))
    bed.stack.enter_context(databases.added("pooled", settings))
    backends = [bed.backend("pooled", command_timeout=30.0) for _ in range(3)]
    failed: list[BaseException] = []

    def work(backend: DatabaseBackend, name: str) -> None:
        try:
            for _ in range(40):
                assert release(backend, grant(backend, request(name))) == "released"
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=work, args=[it, name]) for it in backends for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    with connections["pooled"].cursor() as cursor:
        for name, value in (("statement_timeout", "0"), ("enable_seqscan", "on")):
            cursor.execute(f"SHOW {name}")
            assert cursor.fetchone() == (value,)


@pytest.mark.parametrize("statement", ["DEALLOCATE ALL", "ALTER TABLE {} ADD x int"])
def test_a_statement_that_a_session_cannot_use_any_more_is_prepared_again(
    bed: Bed, postgres_alias: str, statement: str
) -> None:
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    release(backend, grant(backend, request()))
    run(backend, statement.format("django_dlock_leaserecord"))
    try:
        release(backend, grant(backend, request()))
    finally:
        run(backend, "ALTER TABLE django_dlock_leaserecord DROP COLUMN IF EXISTS x")
    assert release(backend, grant(backend, request())) == "released"


def run(backend: DatabaseBackend, statement: str) -> None:
    table_of(backend).call(lambda one, _: one.count(statement), clock.now() + 20.0)


def test_with_djangos_setting_for_poolers_nothing_is_prepared(
    bed: Bed, postgres_alias: str
) -> None:
    settings = {**connections.settings[postgres_alias], "DISABLE_SERVER_SIDE_CURSORS": True}
    bed.stack.enter_context(databases.added("declared", settings))
    backend = bed.backend("declared", command_timeout=20.0)
    lease = grant(backend, request())
    ask(backend, request(waits=True))
    release(backend, lease)
    prepared = "SELECT name FROM pg_prepared_statements"
    assert table_of(backend).call(lambda one, _: one.rows(prepared), clock.now() + 20.0) == []


def test_a_plan_that_was_made_for_a_small_table_uses_the_index(
    bed: Bed, postgres_alias: str
) -> None:
    # A session keeps it when the table has grown.
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    key = store_of(backend).dialect.key(table_of(backend).digest("name"))

    def plans(one: Connection, store: Store) -> Sequence[Any]:
        one.count("ANALYZE django_dlock_leaserecord")
        for _ in range(8):
            one.prepared(postgresql.RELEASE, (key, ME, "key"))
        one.count("SET plan_cache_mode = force_generic_plan")
        found = one.rows(f"{BY_INDEX}EXPLAIN {postgresql.RELEASE.execute}", (key, ME, "key"))
        one.count("RESET plan_cache_mode")
        return found

    text = "\n".join(line for (line,) in table_of(backend).call(plans, clock.now() + 20.0))
    assert "Index Scan" in text
    assert "Seq Scan" not in text


def test_a_renewal_of_many_compares_no_rows_with_each_other(bed: Bed, postgres_alias: str) -> None:
    backend = bed.backend(postgres_alias, command_timeout=20.0)
    leases = [grant(backend, request(f"n{number}")) for number in range(200)]
    asked: list[tuple[str, Any]] = []

    class Noting:
        def rows(self, statement: str, values: Any) -> list[Any]:
            asked.append((statement, values))
            return []

    dialect = store_of(backend).dialect
    keys = [dialect.key(table_of(backend).digest(lease.name)) for lease in leases]
    dialect.renew(
        Noting(),  # type: ignore[arg-type]
        [(key, lease.owner, SECOND) for key, lease in zip(keys, leases, strict=True)],
        "",
    )
    ((statement, values),) = asked
    with connections[postgres_alias].cursor() as cursor:
        # As in a table that has grown since it was last analyzed.
        cursor.execute(
            "DELETE FROM pg_statistic WHERE starelid = 'django_dlock_leaserecord'::regclass"
        )
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values)
        (answer,) = cursor.fetchone()
    plan = json.loads(answer) if isinstance(answer, str) else answer
    assert compared(plan[0]["Plan"]) < 10 * len(leases)


def compared(node: dict[str, Any]) -> float:
    """Rows that joins compared in vain, in this node and those below."""
    inner = sum(compared(each) for each in node.get("Plans", ()))
    return inner + node.get("Rows Removed by Join Filter", 0) * node.get("Actual Loops", 1)
