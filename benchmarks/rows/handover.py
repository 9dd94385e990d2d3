"""How long a hand-over takes: from ``release()`` in one process to ``acquire()`` in another.

One process holds, the other is blocked in its acquire. After a random pause the holder notes
the time and releases; the waiter notes the time when it has acquired. Both read the same
monotonic clock.

In the row ``handover`` the two alternate without a pause: each holder has waited before, and the
next waiter begins to wait at once. In ``handover.slept``, which is the usual case, the holder found
the name free, and the waiter has slept for a while.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import process_time
from typing import TYPE_CHECKING, Any

from .. import catalogue
from ..counting import server_commands
from ..model import OURS, Metric, Readings, Row, Session, Subject
from ..peers import CONFIRMED, COUNTED, DIRECT, TOKEN, Handle, Kind, Route
from ..processes import WorkerFailed

if TYPE_CHECKING:
    from ..bench import Bench
    from ..processes import Worker

CONTENDERS = (
    TOKEN,
    OURS,
    "redis-py Lock",
    "python-redis-lock",
    "pottery Redlock",
    "django-pglock",
)
BLOCKED = 0.01
"""Seconds after which the waiter is certainly waiting."""
SLEPT = (0.05, 0.25)
"""Seconds that a waiter sleeps in ``handover.slept``."""
WATCHED = 1.0
"""Seconds during which a waiter's commands are counted."""
PATIENCE = 20.0
"""Seconds within which a worker must answer."""
AFTERWARDS = 0.002
"""Seconds in which a process may finish its work besides the call."""

LATENCY = Metric("latency", "s", floor=TOKEN, percentiles=(90,))
# For both processes and the server: an acquire that waits, and the release that ends the wait.
CPU = Metric("cpu", "s", floor=TOKEN)
ROUND_TRIPS = Metric("round_trips")
# Commands that the server runs for the same, including those in scripts.
AT_SERVER = Metric("at_server")
# Per second of a longer wait: how often the waiter polls.
COMMANDS_WAITING = Metric("commands_waiting")


def rows(bench: Bench) -> Iterator[Row]:
    kinds = [catalogue.kind(name) for name in CONTENDERS]
    yield Row(
        "handover",
        "call of release() in one process to acquire() returning in another, taking turns",
        (LATENCY, CPU, ROUND_TRIPS, AT_SERVER, COMMANDS_WAITING),
        tuple(subject(bench, kind, slept=False) for kind in kinds),
        rounds=5,
        seconds=27,
    )
    yield Row(
        "handover.slept",
        "the same, where the holder never waited and the waiter has slept for 50 to 250 ms",
        (LATENCY, CPU, ROUND_TRIPS, AT_SERVER),
        tuple(subject(bench, kind, slept=True) for kind in [*kinds, catalogue.kind(CONFIRMED)]),
        rounds=10,
        passes=bench.size(6),
        seconds=65,
    )


def subject(bench: Bench, kind: Kind, *, slept: bool, store: str = "redis") -> Subject:
    @contextmanager
    def open_() -> Iterator[Session]:
        pair = (_SleptPair if slept else _Pair)(bench, kind, store)
        try:
            pair.begin()
        except WorkerFailed:
            # Its late answer would count as that of the next subject.
            bench.workers.close()
            raise
        yield pair
        pair.end()

    return Subject(kind.name, kind.role, kind.options, open_)


@dataclass(frozen=True)
class _HandOver:
    """One hand-over: seconds from release to acquire, of the wait before, of processor time."""

    latency: float
    waited: float
    cpu: float


class _Pair(Session):
    """Two processes that alternate; one of them always holds between two hand-overs."""

    def __init__(self, bench: Bench, kind: Kind, store: str) -> None:
        self._bench, self._kind, self._store = bench, kind, store
        self._name = f"{type(self).__name__}:{kind.name}"
        self._holder, self._waiter = bench.workers.take(2)
        # A polling waiter must not always be met at the same phase.
        self._pauses = (BLOCKED, BLOCKED + (kind.polls or BLOCKED))
        self._samples = bench.size(5 if kind.polls else 20, least=2)
        self._server_idle = bench.server_idle
        # On both routes: a process that subscribes only later misses the last release.
        for worker, route in itertools.product((self._holder, self._waiter), (DIRECT, COUNTED)):
            self._do(worker, "make", route)

    def begin(self) -> None:
        catalogue.prime(self._kind, self._name)
        self._do(self._holder, "acquire")
        self._connect()

    def end(self) -> None:
        self._do(self._holder, "release")

    def _before(self, route: Route) -> None:
        """The steps before a hand-over."""

    def _after(self) -> None:
        self._holder, self._waiter = self._waiter, self._holder

    def once(self) -> Readings:
        return {**self._counts(), "commands_waiting": self._commands_waiting()}

    def round(self) -> Readings:
        found: list[_HandOver] = []
        while len(found) < self._samples:
            self._before(DIRECT)
            one = self._hand_over(DIRECT)
            self._after()
            # On a busy machine the waiter may be so late that nothing was handed over.
            if one.waited > BLOCKED / 2:
                found.append(one)
        return {"latency": [one.latency for one in found], "cpu": [one.cpu for one in found]}

    def _hand_over(self, route: Route) -> _HandOver:
        began, server = time.monotonic(), self._bench.server_spent()
        self._start(self._waiter, "acquire", route)
        time.sleep(random.uniform(*self._pauses))
        released_at, holders_cpu = self._do(self._holder, "release")
        asked_at, acquired_at, waiters_cpu = self._waiter.receive(PATIENCE)
        server = self._bench.server_spent() - server
        server -= self._server_idle * (time.monotonic() - began)
        return _HandOver(
            latency=acquired_at - released_at,
            waited=released_at - asked_at,
            cpu=holders_cpu + waiters_cpu + max(0.0, server),
        )

    def _connect(self, route: Route = DIRECT) -> None:
        for _ in range(2):
            self._before(route)
            self._hand_over(route)
            self._after()

    def _counts(self, times: int = 7) -> Readings:
        """The counts for one hand-over, through the proxy."""
        from redis import Redis

        round_trips, at_server = [], []
        self._connect(COUNTED)
        with Redis.from_url(self._bench.redis.url) as asking:
            for _ in range(times):
                self._before(COUNTED)
                with self._bench.counting() as counted:
                    self._start(self._waiter, "acquire", COUNTED)
                    time.sleep(10 * BLOCKED)
                    # Like the latency: from the release on, without the waiter's first request.
                    before = server_commands(asking)
                    self._do(self._holder, "release")
                    self._waiter.receive(PATIENCE)
                    at_server.append(float(server_commands(asking) - before - 1))
                round_trips.append(float(counted.round_trips))
                self._after()
        counts = {"round_trips": round_trips}
        return {**counts, "at_server": at_server} if self._store == "redis" else counts

    def _commands_waiting(self) -> float:
        self._start(self._waiter, "acquire", COUNTED)
        time.sleep(0.3)
        with self._bench.counting() as counted:
            time.sleep(WATCHED)
        self._do(self._holder, "release")
        self._waiter.receive(PATIENCE)
        self._after()
        return counted.commands / WATCHED

    def _start(self, worker: Worker, verb: str, route: Route = DIRECT) -> None:
        route = replace(route, store=self._store)
        worker.send(f"{__name__}:{verb}", self._kind.name, route, self._name)

    def _do(self, worker: Worker, verb: str, route: Route = DIRECT) -> Any:
        self._start(worker, verb, route)
        return worker.receive(PATIENCE)


class _SleptPair(_Pair):
    """The same process always finds the name free, and hands it over to the other one."""

    def __init__(self, bench: Bench, kind: Kind, store: str) -> None:
        super().__init__(bench, kind, store)
        self._pauses, self._samples = SLEPT, 1

    def begin(self) -> None:
        catalogue.prime(self._kind, self._name)
        self._connect()

    def end(self) -> None:
        """Nobody holds it."""

    def once(self) -> Readings:
        return self._counts()

    def _before(self, route: Route) -> None:
        self._do(self._holder, "acquire", route)

    def _after(self) -> None:
        self._do(self._waiter, "release")


# -- in the workers -------------------------------------------------------------------------

_held: dict[str, Handle] = {}


def make(kind: str, route: Route, name: str) -> None:
    """Connect, and listen where a kind does so."""
    catalogue.maker(kind, route)(name)


def acquire(kind: str, route: Route, name: str) -> tuple[float, float, float]:
    """Return when it began, when it acquired, and the processor time of this process for it."""
    handle, before = catalogue.maker(kind, route)(name), process_time()
    asked_at = time.monotonic()
    handle.acquire()
    acquired_at = time.monotonic()
    _held[name] = handle
    return asked_at, acquired_at, _spent_since(before)


def release(kind: str, _route: Route, name: str) -> tuple[float, float]:
    """Return when it began, and the processor time of this process for it."""
    handle = _held.pop(name)
    before, released_at = process_time(), time.monotonic()
    handle.release()
    return released_at, _spent_since(before)


def _spent_since(before: float) -> float:
    time.sleep(AFTERWARDS)
    return process_time() - before
