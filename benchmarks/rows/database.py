"""Leases in PostgreSQL and SQLite: the same measurements as for Redis, and the table's growth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import catalogue, peers
from ..database_peers import ADVISORY, BARE_SQL, BARE_SQLITE, NOTIFY, PREPARED, ROW
from ..keepers import UPDATE
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject, Unavailable
from ..peers import COUNTED, LEASES, POSTGRES
from ..processes import Worker
from . import cycle, handover, renewal, scale, task, throughput

if TYPE_CHECKING:
    from ..bench import Bench

SIZES = (10, 1_000, 100_000)
ACQUIRED = 1_000
"""Rows acquired one by one; further rows are copies of them with other names."""
HOT_NAMES, HELD = 100, 1_000
"""Names that ``db.bloat`` acquires and releases, and other rows in the same table."""
CYCLES = 20_000
PGLOCK = "django-pglock"
TASKS: tuple[tuple[str, Role, str, str], ...] = (
    (task.PLAIN, "floor", "writing", "acks_late and reject_on_worker_lost, as all of them"),
    (OURS, "ours", "writing-locked", 'LockedTask, lock_key="order:{order}", in PostgreSQL'),
    (
        f"{OURS}, with record",
        "ours",
        "writing-recorded",
        "the same with an idempotency_key and atomic=True: record and row in one transaction",
    ),
)
FILL = f"""
INSERT INTO {{schema}}.{LEASES} SELECT copy.* FROM generate_series({{first}}, {{last}}) number,
  (SELECT * FROM {{schema}}.{LEASES} LIMIT 1) l,
  jsonb_populate_record(NULL::{{schema}}.{LEASES}, to_jsonb(l) || jsonb_build_object(
    'id', gen_random_uuid(), 'name', 'lock:' || number, 'owner', md5(number::text), 'ended', '',
    'ends_at', l.ends_at + 3600000000
  )) copy"""


def rows(bench: Bench) -> Iterator[Row]:
    for names, title in cycle.NAMES.items():
        kinds = {BARE_SQL: BARE_SQL, PREPARED: PREPARED, OURS: OURS, PGLOCK: PGLOCK}
        ways = {
            name: cycle.Way(kind, fresh=names == "fresh", store="postgres")
            for name, kind in kinds.items()
        }
        ways[f"{OURS}, prepared"] = replace(ways[OURS], store="prepared")
        if names == "same":
            ways[ROW] = replace(ways[OURS], kind=ROW)
        yield cycle.row(bench, f"db.cycle.{names}", f"PostgreSQL: {title}", ways, BARE_SQL)
    ways = {name: cycle.Way(name, store="sqlite") for name in (BARE_SQLITE, OURS)}
    yield cycle.row(bench, "db.cycle.sqlite", f"SQLite: {cycle.NAMES['same']}", ways, BARE_SQLITE)
    yield from _handovers(bench)
    yield from _throughputs(bench)
    yield Row(
        "db.renewal.10000",
        "PostgreSQL: 10 000 renewed leases in one process, per interval",
        _over(UPDATE, renewal.METRICS),
        tuple(
            renewal.subject(bench, name, renewal.Many(renewal.MANY, 9.0, 2, 30.0), "postgres")
            for name in (UPDATE, OURS)
        ),
        rounds=2,
        seconds=80,
    )
    yield Row(
        "db.scale",
        "PostgreSQL: operations among locks that others hold",
        _over(scale.among(SIZES[0]), scale.METRICS),
        tuple(_among(bench, size) for size in SIZES),
        rounds=5,
        seconds=60,
    )
    yield task.row(
        bench,
        "db.task",
        "PostgreSQL: a task that writes one row in a transaction, one process (prefork)",
        TASKS,
        rounds=12,
    )
    yield _once(bench, "db.bloat", "the table after many cycles of 100 names", BLOAT, _bloat)
    yield _once(bench, "db.idle", "while nothing is held or waited for", IDLE, _idle)


def _over(floor: str, metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
    return tuple(replace(one, floor=one.floor and floor) for one in metrics)


def _handovers(bench: Bench) -> Iterator[Row]:
    kinds = [catalogue.kind(name) for name in (NOTIFY, OURS, PGLOCK, ROW)]
    metrics = (handover.LATENCY, handover.CPU, handover.ROUND_TRIPS, handover.COMMANDS_WAITING)
    for slept, title in (
        (False, "release() in one process to acquire() in another, taking turns"),
        (True, "the same, where the waiter has slept for 50 to 250 ms"),
    ):
        more = [catalogue.kind(peers.CONFIRMED)] if slept else []
        yield Row(
            "db.handover.slept" if slept else "db.handover",
            f"PostgreSQL: {title}",
            _over(NOTIFY, metrics),
            tuple(
                handover.subject(bench, kind, slept=slept, store="postgres")
                for kind in [*kinds, *more]
            ),
            rounds=10 if slept else 5,
            passes=bench.size(4) if slept else 1,
            seconds=35 if slept else 15,
        )


def _throughputs(bench: Bench) -> Iterator[Row]:
    load = throughput.Load(8, 0.4 if bench.quick else 1.0)
    for store, title, names in (
        ("postgres", "PostgreSQL", (ADVISORY, OURS, PGLOCK, ROW)),
        ("sqlite", "SQLite", (OURS,)),
    ):
        floor = ADVISORY if ADVISORY in names else None
        yield Row(
            "db.throughput.8" + (".sqlite" if store == "sqlite" else ""),
            f"{title}: 8 processes on one name, without a pause",
            tuple(replace(one, floor=one.floor and floor) for one in throughput.METRICS),
            tuple(throughput.subject(bench, catalogue.kind(name), load, store) for name in names),
            rounds=7,
            seconds=40,
        )


# -- growth ---------------------------------------------------------------------------------


def _need_postgres(bench: Bench) -> None:
    if not bench.postgres_url:
        raise Unavailable(peers.no_postgres())


def _among(bench: Bench, size: int) -> Subject:
    @contextmanager
    def ready() -> Iterator[Session]:
        _need_postgres(bench)
        held = _Rows(bench, size)
        yield held
        held.close()

    role: Role = "floor" if size == SIZES[0] else "ours"
    return Subject(f"among {size:,}".replace(",", " "), role, "tables of their own", ready)


class _Rows(scale.Among):
    """A table with this many held locks."""

    def __init__(self, bench: Bench, size: int) -> None:
        from django_dlock.backends.base import AliasOptions
        from django_dlock.backends.database import DatabaseBackend

        options = {"database": f"held-{size}"}
        # A search of the whole table may take longer than the default for a command.
        alias = AliasOptions("scale", "database", options=options, command_timeout=10)
        backend = DatabaseBackend(alias)
        super().__init__(bench.server_spent, backend, min(size, ACQUIRED))
        self._table, schema = f"held_{size}.{LEASES}", f"held_{size}"
        bench.sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}")
        for table in (LEASES, peers.PROCESSES):
            bench.sql(f"CREATE TABLE {schema}.{table} (LIKE public.{table} INCLUDING ALL)")
        for number in range(min(size, ACQUIRED)):
            request = scale.request_for(f"lock:{number}")
            backend.acquire(request, deadline=backend.call_deadline())
        bench.sql(FILL.format(schema=schema, first=ACQUIRED, last=size - 1))
        bench.sql(f"VACUUM ANALYZE {self._table}")
        (used,) = bench.sql(f"SELECT pg_total_relation_size('{self._table}')")
        self._bytes = used / size

    def once(self) -> Readings:
        return {"memory": self._bytes} if self._size == ACQUIRED else {}

    def close(self) -> None:
        self._backend.close()


# -- the table ------------------------------------------------------------------------------

BLOAT = (
    Metric("cycles"),
    # The share of updates that wrote no index.
    Metric("hot_share", better="higher"),
    Metric("size_before", "MiB"),
    Metric("size_after", "MiB"),
    Metric("dead_rows"),
    Metric("vacuums"),
    # One cycle in the first tenth, and one in the last.
    Metric("first", "s"),
    Metric("last", "s"),
)
IDLE = (Metric("statements"), Metric("watched", "s"))


def _once(
    bench: Bench,
    name: str,
    title: str,
    metrics: tuple[Metric, ...],
    read: Callable[[Bench], Readings],
) -> Row:
    class Once(Session):
        def once(self) -> Readings:
            return read(bench)

    @contextmanager
    def ready() -> Iterator[Session]:
        _need_postgres(bench)
        yield Once()

    options = "PostgreSQL's defaults, but fsync off: autovacuum as shipped"
    subject = Subject(OURS, "ours", options, ready)
    return Row(name, f"PostgreSQL: {title}", metrics, (subject,), rounds=1, seconds=40)


def _bloat(bench: Bench) -> Readings:
    cycles = bench.cycles or bench.size(CYCLES)
    with Worker() as worker:
        call, route = f"{__name__}:cycles", POSTGRES
        worker.call(call, route, HOT_NAMES)
        bench.sql(FILL.format(schema="public", first=1, last=HELD))
        updates, hot, _, vacuums, before = _statistics(bench)
        tenths = [worker.call(call, route, cycles // 10, timeout=600.0) for _ in range(10)]
        # A session reports its statistics within a second, if it then does something.
        time.sleep(1.5)
        worker.call(call, route, 1)
        time.sleep(0.5)
    its = _statistics(bench)
    return {
        "cycles": cycles,
        "hot_share": (its[1] - hot) / max(1, its[0] - updates),
        "size_before": before,
        "size_after": its[4],
        "dead_rows": its[2],
        "vacuums": its[3] - vacuums,
        "first": tenths[0],
        "last": tenths[-1],
    }


def _statistics(bench: Bench) -> list[Any]:
    """Updates, hot ones, dead rows, automatic vacuums, and MiB with the indexes."""
    return bench.sql(
        "SELECT n_tup_upd, n_tup_hot_upd, n_dead_tup, autovacuum_count, "
        "pg_total_relation_size(relid) / 1048576.0::float8 "
        f"FROM pg_stat_user_tables WHERE relname = '{LEASES}' AND schemaname = 'public'"
    )


def _idle(bench: Bench) -> Readings:
    route, seconds = replace(COUNTED, store="postgres"), 3.0 if bench.quick else 15.0
    with Worker() as worker, Worker() as other:
        # Both have held it, and one has waited.
        worker.call(f"{handover.__name__}:acquire", OURS, route, "idle")
        other.send(f"{handover.__name__}:acquire", OURS, route, "idle")
        time.sleep(1.0)
        worker.call(f"{handover.__name__}:release", OURS, route, "idle")
        other.receive()
        other.call(f"{handover.__name__}:release", OURS, route, "idle")
        with bench.counting() as counted:
            time.sleep(seconds)
    return {"statements": counted.commands, "watched": seconds}


# -- in the worker --------------------------------------------------------------------------


def cycles(route: peers.Route, count: int) -> float:
    """Acquire and release the names in turn; return the seconds per cycle."""
    one, began = catalogue.cycling(OURS, route), time.perf_counter()
    for number in range(count):
        one(f"hot:{number % HOT_NAMES}")
    return (time.perf_counter() - began) / count
