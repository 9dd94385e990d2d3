"""What one acquire and release costs when nobody else wants the name.

Once where the system puts client and server, as everybody runs them, and once on one CPU, where
nobody has to wake another, so that what each does itself weighs the most; see
``Bench.on_one_cpu``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from .. import peers
from ..bench import PINS
from ..counting import server_commands
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject
from ..peers import COUNTED, DIRECT, Where

if TYPE_CHECKING:
    from ..bench import Bench

NAMES = {
    "cycle.same": "acquire and release one name again and again",
    "cycle.fresh": "acquire and release a new name each time",
}
WARM_UP, TURN = 30, 25

Naming = Callable[[], str]
Measure = Callable[[Where, Naming, int], list[float]]
"""Carries out so many cycles; the seconds that each of them took."""
Measuring = Callable[[], AbstractContextManager[Measure]]
Servers = Callable[[], Sequence[int]]
"""Processes of servers other than the Redis."""

METRICS = (
    Metric("cycle", "s", floor=peers.BARE, percentiles=(99,)),
    # Of the client's process, whatever it does while it waits.
    Metric("cpu", "s", floor=peers.BARE),
    Metric("round_trips"),
    Metric("commands"),
    # More than were sent, where scripts run commands of their own.
    Metric("at_server"),
)


def rows(bench: Bench) -> Iterator[Row]:
    for name, title in NAMES.items():
        yield Row(
            name,
            title,
            METRICS,
            tuple(_subjects(bench, fresh=name == "cycle.fresh", pins=False)),
            rounds=15,
            passes=bench.size(16),
            seconds=22,
        )
    if not PINS:
        return
    for name, title in NAMES.items():
        yield Row(
            name.replace("cycle", "cycle.one_cpu"),
            f"{title}, client and server on one CPU",
            METRICS,
            tuple(_subjects(bench, fresh=name == "cycle.fresh", pins=True)),
            rounds=5,
            passes=bench.size(16),
            seconds=4,
        )


def _subjects(bench: Bench, *, fresh: bool, pins: bool) -> Iterator[Subject]:
    def subject(
        name: str,
        measuring: Measuring,
        options: str,
        role: Role = "ours",
        *,
        servers: Servers = tuple,
    ) -> Subject:
        numbers = itertools.count()

        def naming() -> str:
            return f"cycle:{name}:{next(numbers) if fresh else 'same'}"

        @contextmanager
        def open_() -> Iterator[Session]:
            with measuring() as measure:
                cycles = _Cycles(bench, naming, measure, servers, pins=pins)
                cycles.warm_up()
                yield cycles

        return Subject(name, role, options, open_)

    for kind in peers.KINDS:
        if kind.name != peers.TOKEN:
            measuring, about = partial(_of_threads, kind.name), (kind.options, kind.role)
            yield subject(kind.name, measuring, *about, servers=kind.servers)
    yield subject(f"{OURS}, async", _of_coroutines, "async with; timed within one coroutine")


class _Cycles(Session):
    def __init__(
        self, bench: Bench, naming: Naming, measure: Measure, servers: Servers, *, pins: bool
    ) -> None:
        self._bench, self._naming, self._measure = bench, naming, measure
        self._servers, self._pins = servers, pins

    def warm_up(self) -> None:
        with self._placed():
            self._measure(DIRECT, self._naming, WARM_UP)

    def once(self) -> Readings:
        """Counts, by way of the proxy."""
        from redis import Redis

        cycles = 20
        self._measure(COUNTED, self._naming, 3)
        with Redis.from_url(self._bench.redis.url) as asking, self._bench.counting() as counted:
            before = server_commands(asking)
            self._measure(COUNTED, self._naming, cycles)
            # The first reading of the counters is itself counted by the second.
            at_server = server_commands(asking) - before - 1
        return {
            "round_trips": counted.round_trips / cycles,
            "commands": counted.commands / cycles,
            "at_server": at_server / cycles,
        }

    def round(self) -> Readings:
        with self._placed():
            before = process_time()
            took = self._measure(DIRECT, self._naming, TURN)
            return {"cycle": took, "cpu": [(process_time() - before) / TURN]}

    def _placed(self) -> AbstractContextManager[None]:
        return self._bench.on_one_cpu(*self._servers()) if self._pins else nullcontext()


@contextmanager
def _of_threads(name: str) -> Iterator[Measure]:
    made: dict[Where, Callable[[str], None]] = {}

    def measure(where: Where, naming: Naming, count: int) -> list[float]:
        if where not in made:
            made[where] = peers.kind(name).cycling(where)
        cycle, took = made[where], []
        for _ in range(count):
            key = naming()
            started = perf_counter()
            cycle(key)
            took.append(perf_counter() - started)
        return took

    yield measure


@contextmanager
def _of_coroutines() -> Iterator[Measure]:
    loop = asyncio.new_event_loop()

    async def cycles(where: Where, naming: Naming, count: int) -> list[float]:
        from django_dlock import Lock

        took = []
        for _ in range(count):
            key = naming()
            started = perf_counter()
            async with Lock(key, using=where.alias, wait=None):
                pass
            took.append(perf_counter() - started)
        return took

    def measure(where: Where, naming: Naming, count: int) -> list[float]:
        return loop.run_until_complete(cycles(where, naming, count))

    try:
        yield measure
    finally:
        loop.close()
