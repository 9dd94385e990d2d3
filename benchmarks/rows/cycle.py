"""The cost of one acquire and release without contention, in every environment.

The client is a process with the parser of the row. A turn is a number of cycles in sequence; its
time is divided by that number. On a busy machine a process gets its processor for some
milliseconds at a time. Most cycles then meet no pause and some meet a long one, which a median of
single cycles would hide.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from .. import catalogue, peers
from ..beds import BEDS, IDLE, Bed
from ..counting import server_commands
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject
from ..parsers import HIREDIS, PARSERS, PYTHON
from ..peers import AWAITED, COUNTED, Route

if TYPE_CHECKING:
    from ..bench import Bench

NAMES = {
    "same": "acquire and release one name again and again",
    "fresh": "acquire and release a new name each time",
}
WARM_UP, COUNTED_CYCLES = 30, 20

THREADED = "threaded"


def row_name(bed: str, names: str, parser: str) -> str:
    return f"cycle.{bed}.{names}" + (".hiredis" if parser == HIREDIS else "")


@dataclass(frozen=True)
class Way:
    """How a subject cycles, and where."""

    kind: str
    bed: Bed = IDLE
    parser: str = PYTHON
    fresh: bool = False
    awaited: bool = False
    store: str = "redis"


def rows(bench: Bench) -> Iterator[Row]:
    for bed, parser, names in itertools.product(BEDS.values(), PARSERS, NAMES):
        ways = {
            kind.name: Way(kind.name, bed, parser, fresh=names == "fresh")
            for kind in peers.KINDS
            if kind.name != peers.TOKEN
        }
        yield row(bench, row_name(bed.name, names, parser), NAMES[names], ways, peers.BARE)
    yield row(
        bench,
        "cycle.awaited",
        "acquire and release one name within a coroutine, and within a thread",
        {
            THREADED: Way(OURS),
            OURS: Way(OURS, awaited=True),
            "redis-py Lock, threaded": Way("redis-py Lock"),
            "redis-py Lock": Way("redis-py Lock", awaited=True),
        },
        THREADED,
    )


def row(bench: Bench, name: str, title: str, ways: Mapping[str, Way], floor: str) -> Row:
    metrics = (
        Metric("latency", "s", floor=floor),
        # Of the client's process and of the server.
        Metric("cpu", "s", floor=floor),
        Metric("round_trips"),
        Metric("commands"),
        # More than were sent, if scripts run commands of their own.
        Metric("at_server"),
    )
    way = ways[floor]
    return Row(
        name,
        title,
        metrics,
        tuple(_subject(bench, subject, way, floor) for subject, way in ways.items()),
        rounds=9,
        passes=bench.size(20),
        seconds=20 if way.bed.spinning else 15,
        bed=way.bed.name,
        parser=way.parser,
    )


def _subject(bench: Bench, name: str, way: Way, floor: str) -> Subject:
    kind = catalogue.kind(way.kind)

    @contextmanager
    def open_() -> Iterator[Session]:
        cycles = _Cycles(bench, way)
        cycles.warm_up()
        yield cycles

    role: Role = "floor" if name == floor else kind.role
    options = "async with, timed within one coroutine" if way.awaited else kind.options
    return Subject(name, role, options, open_)


class _Cycles(Session):
    def __init__(self, bench: Bench, way: Way) -> None:
        self._bench, self._way = bench, way
        self._client = bench.client(way.parser)

    def warm_up(self) -> None:
        self._turn(self._way.bed.route, WARM_UP)

    def once(self) -> Readings:
        """Counts, through the proxy."""
        from redis import Redis

        if self._way.store == "sqlite":
            return {}
        self._turn(COUNTED, 3)
        with Redis.from_url(self._bench.redis.url) as asking, self._bench.counting() as counted:
            before = server_commands(asking)
            self._turn(COUNTED, COUNTED_CYCLES)
            # The second reading also counts the first reading of the counters.
            at_server = server_commands(asking) - before - 1
        counts = {
            "round_trips": counted.round_trips / COUNTED_CYCLES,
            "commands": counted.commands / COUNTED_CYCLES,
        }
        if self._way.store == "redis":
            counts["at_server"] = at_server / COUNTED_CYCLES
        return counts

    def round(self) -> Readings:
        count, before = self._way.bed.turn, self._bench.server_spent()
        seconds, spent = self._turn(self._way.bed.route, count)
        spent += self._bench.server_spent() - before
        return {"latency": [seconds / count], "cpu": [spent / count]}

    def _turn(self, route: Route, count: int) -> tuple[float, float]:
        way = self._way
        function = f"{__name__}:{'awaited_turn' if way.awaited else 'turn'}"
        route = replace(route, store=way.store)
        answer: tuple[float, float] = self._client.call(function, way.kind, route, way.fresh, count)
        return answer


# -- in the client's process ----------------------------------------------------------------

_numbers = itertools.count()


def turn(kind: str, route: Route, fresh: bool, count: int) -> tuple[float, float]:
    """Run ``count`` cycles; return their seconds, and the seconds of processor time."""
    cycle, names = catalogue.cycling(kind, route), _names(kind, fresh, count)
    spent, began = process_time(), perf_counter()
    for name in names:
        cycle(name)
    return perf_counter() - began, process_time() - spent


def awaited_turn(kind: str, route: Route, fresh: bool, count: int) -> tuple[float, float]:
    """As ``turn``, within one coroutine."""
    cycle, names = _awaited_cycle(kind, route), _names(kind, fresh, count)

    async def cycles() -> tuple[float, float]:
        spent, began = process_time(), perf_counter()
        for name in names:
            await cycle(name)
        return perf_counter() - began, process_time() - spent

    return _loop().run_until_complete(cycles())


def _names(kind: str, fresh: bool, count: int) -> Sequence[str]:
    return [f"cycle:{kind}:{next(_numbers) if fresh else 'same'}" for _ in range(count)]


@cache
def _awaited_cycle(kind: str, route: Route) -> Callable[[str], Awaitable[None]]:
    return AWAITED[kind](route)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()
