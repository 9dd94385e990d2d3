"""What one acquire and release costs when nobody else wants the name.

Client and server share one CPU, see ``Bench.on_one_cpu``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from .. import peers
from ..bench import PINS
from ..counting import server_commands
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject
from ..peers import COUNTED, DIRECT, Where

if TYPE_CHECKING:
    from ..bench import Bench

SAME, FRESH = "cycle.same", "cycle.fresh"
WARM_UP = 30

Naming = Callable[[], str]
Measure = Callable[[Where, Naming, int], list[float]]
"""Carries out so many cycles; the seconds that each of them took."""
Measuring = Callable[[], AbstractContextManager[Measure]]
Servers = Callable[[], Sequence[int]]
"""Processes of servers other than the Redis."""

METRICS = (
    Metric("cycle", "s", floor=peers.BARE, percentiles=(99,)),
    Metric("round_trips"),
    Metric("commands"),
    # More than were sent, where scripts run commands of their own.
    Metric("at_server"),
)


def rows(bench: Bench) -> Iterator[Row]:
    for name, title in (
        (SAME, "acquire and release one name again and again"),
        (FRESH, "acquire and release a new name each time"),
    ):
        yield Row(
            name,
            f"{title}{', client and server on one CPU' if PINS else ''}",
            METRICS,
            tuple(_subjects(bench, fresh=name == FRESH)),
            rounds=15,
            passes=bench.size(20),
            seconds=30,
        )


def _subjects(bench: Bench, *, fresh: bool) -> Iterator[Subject]:
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
                with bench.on_one_cpu():
                    measure(DIRECT, naming, WARM_UP)
                yield _Cycles(bench, naming, measure, servers)

        return Subject(name, role, options, open_)

    for kind in peers.KINDS:
        if kind.name != peers.TOKEN:
            measuring, about = partial(_of_threads, kind.name), (kind.options, kind.role)
            yield subject(kind.name, measuring, *about, servers=kind.servers)
    yield subject(f"{OURS}, async", _of_coroutines, "async with; timed within one coroutine")


class _Cycles(Session):
    def __init__(self, bench: Bench, naming: Naming, measure: Measure, servers: Servers) -> None:
        self._bench, self._naming, self._measure = bench, naming, measure
        self._servers = servers

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
        with self._bench.on_one_cpu(*self._servers()):
            return {"cycle": self._measure(DIRECT, self._naming, 25)}


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
