"""Several processes on one name: throughput, fairness, and waiting times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import catalogue
from ..model import OURS, Metric, Readings, Row, Session, Subject
from ..peers import COUNTED, DIRECT, TOKEN, Kind, Route
from ..processes import sleep_until

if TYPE_CHECKING:
    from ..bench import Bench

CONTENDERS = (
    TOKEN,
    OURS,
    "redis-py Lock",
    "python-redis-lock",
    "pottery Redlock",
    "django-pglock",
)

THROUGHPUT = Metric("throughput", "/s", better="higher", floor=TOKEN)
SHARE = Metric("share", better="higher")
# Of all processes and the server, per acquire and release, including the waiting.
CPU = Metric("cpu", "s", floor=TOKEN)
ROUND_TRIPS = Metric("round_trips")
WORST_WAIT = Metric("worst_wait", "s", floor=TOKEN)
METRICS = (THROUGHPUT, CPU, WORST_WAIT, SHARE, ROUND_TRIPS)


@dataclass(frozen=True)
class Load:
    """What the processes do for ``seconds``: hold it, and then pause."""

    processes: int
    seconds: float
    hold: float = 0.0
    pause: float = 0.0


def rows(bench: Bench) -> Iterator[Row]:
    for processes in (1, 2, 4, 8, 16):
        budgeted = processes == 8
        load = Load(processes, 0.2 if bench.quick else 0.4 if budgeted else 0.25)
        yield Row(
            f"throughput.{processes}",
            f"{processes} process{'es' * (processes > 1)} on one name, without a pause",
            METRICS,
            tuple(subject(bench, catalogue.kind(name), load) for name in CONTENDERS),
            rounds=12 if budgeted else 3 if processes < 8 else 2,
            seconds=50 if budgeted else 11,
            family="throughput",
            x=processes,
        )
    load = Load(8, 0.3 if bench.quick else 0.6, hold=0.002, pause=0.005)
    yield Row(
        "pause.8",
        "8 processes on one name, which hold it for 2 ms and pause for 5 ms",
        METRICS,
        tuple(subject(bench, catalogue.kind(name), load) for name in CONTENDERS),
        rounds=7,
        seconds=38,
    )


def subject(bench: Bench, kind: Kind, load: Load, store: str = "redis") -> Subject:
    @contextmanager
    def open_() -> Iterator[Session]:
        yield _Contenders(bench, kind, load, store)

    return Subject(kind.name, kind.role, kind.options, open_)


@dataclass(frozen=True)
class _Gained:
    """The result of one process.

    Attributes:
        in_time, in_all: How often it acquired within the time, and in total.
        worst_wait: Its longest wait, in seconds.
        cpu: Seconds of its processor time.
    """

    in_time: int
    in_all: int
    worst_wait: float
    cpu: float


class _Contenders(Session):
    def __init__(self, bench: Bench, kind: Kind, load: Load, store: str) -> None:
        self._bench, self._kind, self._load, self._store = bench, kind, load, store
        self._name = f"contended:{kind.name}"
        catalogue.prime(kind, self._name)
        self._contend(DIRECT, 0.05)

    def once(self) -> Readings:
        if self._store == "sqlite":
            return {}
        self._contend(COUNTED, 0.05)
        with self._bench.counting() as counted:
            gained = self._contend(COUNTED, self._load.seconds)
        return {"round_trips": counted.round_trips / _acquires(gained)}

    def round(self) -> Readings:
        server = self._bench.server_spent()
        gained = self._contend(DIRECT, self._load.seconds)
        cpu = sum(each.cpu for each in gained) + self._bench.server_spent() - server
        counts = [each.in_time for each in gained]
        return {
            "throughput": sum(counts) / self._load.seconds,
            "cpu": cpu / _acquires(gained),
            "share": min(counts) / max(*counts, 1),
            "worst_wait": max(each.worst_wait for each in gained),
        }

    def _contend(self, route: Route, seconds: float) -> list[_Gained]:
        load, route = self._load, replace(route, store=self._store)
        # By then all processes are ready.
        start_at = time.monotonic() + 0.05 + 0.01 * load.processes
        return self._bench.workers.run(
            load.processes,
            f"{__name__}:contend",
            _Turn(self._kind.name, route, self._name, load, start_at, start_at + seconds),
        )


def _acquires(gained: Sequence[_Gained]) -> int:
    return max(1, sum(each.in_all for each in gained))


# -- in the workers -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Turn:
    """The arguments of all processes."""

    kind: str
    route: Route
    name: str
    load: Load
    start_at: float
    stop_at: float


def contend(_number: int, turn: _Turn) -> _Gained:
    """Acquire and release until the time is over."""
    make, load = catalogue.maker(turn.kind, turn.route), turn.load
    in_time = in_all = 0
    worst_wait = 0.0
    sleep_until(turn.start_at)
    cpu = time.process_time()
    asked_at = time.monotonic()
    while asked_at < turn.stop_at:
        handle = make(turn.name)
        handle.acquire()
        acquired_at = time.monotonic()
        if load.hold:
            time.sleep(load.hold)
        handle.release()
        worst_wait = max(worst_wait, acquired_at - asked_at)
        in_time += acquired_at < turn.stop_at
        in_all += 1
        if load.pause:
            time.sleep(load.pause)
        asked_at = time.monotonic()
    cpu = time.process_time() - cpu
    return _Gained(in_time, in_all, worst_wait, cpu)
