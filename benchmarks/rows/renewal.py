"""The cost of holding many leases that are renewed.

Each round acquires them in a new process and measures the processor time of some intervals. An
interval is the time in which all leases are renewed once. It differs between subjects, so the cost
is divided by the number of renewals that really happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import catalogue, keepers, peers
from ..keepers import NODE_SCRIPTS, SCRIPT, UPDATE
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject, Unavailable
from ..peers import COUNTED, DIRECT, STORES, Route
from ..processes import Worker, WorkerFailed

if TYPE_CHECKING:
    from ..bench import Bench

Connections: TypeAlias = frozenset[int]
"""The ids that the server has given them."""

MANY = 10_000
SESSION = "django-pglock"
FLOORS = (SCRIPT, UPDATE, NODE_SCRIPTS)
RENEWING = "python-redis-lock, renewing"

METRICS = (
    # Of the process and of Redis.
    Metric("cpu", "s", floor=SCRIPT),
    Metric("round_trips"),
    Metric("threads"),
    Metric("connections"),
    Metric("memory", "MiB"),
    Metric("lost"),
)

OPTIONS: dict[str, tuple[Role, str]] = {
    UPDATE: (
        "floor",
        "psycopg: a thread that extends leases in an UPDATE; no handles",
    ),
    SCRIPT: ("floor", "redis-py: a thread that calls GET and PEXPIRE in Lua; no handles"),
    NODE_SCRIPTS: ("floor", "redis-py: the same on 3 servers, one after the other; no handles"),
    OURS: ("ours", "renewed by the watchdog; all handles are kept"),
    RENEWING: ("peer", "auto_renewal=True, a thread for each; expire in whole seconds, rounded up"),
    SESSION: ("peer", "one session holds all and renews nothing; PostgreSQL as installed"),
}


@dataclass(frozen=True)
class Many:
    """How many leases with which TTL in seconds, and how many of our intervals are measured."""

    count: int
    ttl: float
    intervals: int
    counted_ttl: float | None = None
    """While round trips are counted. If acquiring takes longer than an interval, a renewal is
    always under way, and a count that begins or ends within it is wrong by one. If the pauses last
    5 s, the heartbeats that the watchdog then sends by themselves are counted, too."""

    @property
    def seconds(self) -> float:
        return self.ttl / 3 * self.intervals


def rows(bench: Bench) -> Iterator[Row]:
    for count in (100, 1000, MANY):
        # The shortest TTL that ``brisk`` allows; 10 000 take longer to acquire.
        many = Many(count, 6.0, 2, 12.0) if count == MANY else Many(count, 1.5, 3)
        names = [SCRIPT, OURS, RENEWING]
        if count == 1000:
            # It takes longer and longer for each, 20 s for 10 000.
            names.append(SESSION)
        yield Row(
            f"renewal.{count}",
            f"{count} renewed leases in one process, per interval",
            METRICS,
            tuple(subject(bench, name, many) for name in names),
            rounds=2,
            seconds={MANY: 60, 1000: 27}.get(count, 15),
            family="renewal",
            x=count,
        )


def subject(bench: Bench, name: str, many: Many, store: str = "redis") -> Subject:
    @contextmanager
    def open_() -> Iterator[Session]:
        # Raises if it is not installed, or there is no server.
        catalogue.kind(OURS if name in FLOORS else name).make(replace(DIRECT, store=store))
        yield _Keeping(bench, name, many, store)

    return Subject(name, *OPTIONS[name], open_)


class _Keeping(Session):
    def __init__(self, bench: Bench, subject: str, many: Many, store: str) -> None:
        self._bench, self._subject, self._many, self._store = bench, subject, many, store
        # At least three times the default ``command_timeout``.
        short = many.ttl < 3.0
        self._direct, self._counted = (
            replace(route, brisk=short, store=store) for route in (DIRECT, COUNTED)
        )
        # A peer that takes longer is reported as unable.
        self._timeout = 60.0 if subject in (*FLOORS, OURS) else 10.0
        # python-redis-lock takes long to detect a failure, and a session renews nothing.
        self._once_only = subject == SESSION or (subject == RENEWING and many.count == MANY)

    def once(self) -> Readings:
        """In a new interpreter for its memory, and through the proxy; needs many leases."""
        if self._once_only:
            try:
                with self._holding(self._direct, fresh=True) as (worker, growth, connections):
                    self._call(worker, "watch", self._many.seconds)
                    return {"memory": growth, **self._state(worker, connections)}
            except WorkerFailed as error:
                raise Unavailable(error.reason) from error
        if self._many.count < 1000:
            return {}
        many = replace(self._many, ttl=self._many.counted_ttl or self._many.ttl)
        with self._holding(self._counted, fresh=True, many=many) as (worker, growth, _):
            # Leases acquired during renewals are renewed together from the second interval on, or
            # from the third if renewals take long.
            self._call(worker, "watch", 2 * many.ttl / 3)
            return {"memory": growth, "round_trips": self._round_trips(worker, many)}

    def round(self) -> Readings:
        if self._once_only:
            return {}
        with self._holding(self._direct) as (worker, _, connections):
            before = self._bench.server_spent()
            renewed, cpu = self._call(worker, "watch", self._many.seconds)
            cpu += self._bench.server_spent() - before
            if not renewed:
                raise Unavailable("nothing was renewed in time")
            return {"cpu": cpu / renewed, **self._state(worker, connections)}

    @contextmanager
    def _holding(
        self, route: Route, *, fresh: bool = False, many: Many | None = None
    ) -> Iterator[tuple[Worker, float, Connections]]:
        """A process that holds them, the MiB by which it has grown, and the earlier connections."""
        many, connections = many or self._many, self._connections()
        try:
            with Worker(fresh=fresh) as worker:
                growth = self._call(worker, "hold", self._subject, route, many.count, many.ttl)
                # Until the first renewals are over.
                self._call(worker, "watch", many.ttl / 3)
                yield worker, growth, connections
        finally:
            self._bench.clear()

    def _state(self, worker: Worker, earlier: Connections) -> dict[str, float]:
        now = self._connections()
        threads, lost = self._call(worker, "state", self._many.count)
        state = {"threads": threads, "lost": lost}
        return state if self._store in STORES else {**state, "connections": len(now - earlier)}

    def _round_trips(self, worker: Worker, many: Many) -> float:
        """How many renew all of them once; counted from one pause between renewals to another."""
        self._await_pause(many)
        before: float = self._call(worker, "renewed")
        with self._bench.counting() as counted:
            time.sleep(many.seconds)
            self._await_pause(many)
        renewed: float = self._call(worker, "renewed") - before
        if not renewed:
            raise Unavailable("nothing was renewed in time")
        # Tenths are not exact as floats: 20.000000000000004 would be behind a limit of 20.
        return round(counted.round_trips / renewed, 6)

    def _await_pause(self, many: Many) -> None:
        """Wait for a pause between renewals; with a thread per lease there may be none."""
        patience, passed = time.monotonic() + many.ttl / 3, None
        while passed != (passed := [proxy.total for proxy in self._bench.proxies]):
            if time.monotonic() > patience:
                return
            time.sleep(many.ttl / 12)

    def _call(self, worker: Worker, function: str, *args: Any) -> Any:
        return worker.call(f"{keepers.__name__}:{function}", *args, timeout=self._timeout)

    def _connections(self) -> Connections:
        """The server's clients without this one; those of an earlier process may end meanwhile."""
        if self._store == "postgres":
            (pids,) = self._bench.sql(
                "SELECT array_agg(pid) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
            return frozenset(pids or ())
        with peers.client(DIRECT) as asking:
            mine = asking.client_id()
            return frozenset(int(one["id"]) for one in asking.client_list()) - {mine}
