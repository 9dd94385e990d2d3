"""The cost of a thousand waiters in one process: connections, commands, and processor time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import catalogue, peers, processor
from ..counting import server_commands
from ..model import OURS, Metric, Readings, Row, Session, Subject
from ..peers import DIRECT
from ..processes import Worker

if TYPE_CHECKING:
    from ..bench import Bench

WAITERS = 1000
SETTLE = 3.0
"""Seconds in which all of them begin to wait."""
WATCH, WATCH_MANY = 3.0, 10.0
"""Seconds of the measurement; longer for many names, because each may poll sometimes."""

METRICS = (
    # By all together, including those in scripts, while nothing is released.
    Metric("commands", "/s"),
    # Processor time of the process and of the server, per second.
    Metric("cpu_per_second", "s"),
    Metric("connections"),
    # How many are still waiting afterwards.
    Metric("still_waiting", better="higher"),
)

TASKS = "tasks"
"""Used instead of a kind: our locks in asyncio tasks."""


def rows(bench: Bench) -> Iterator[Row]:
    one, many = "threads for one name", "threads, each for its own name"
    yield Row(
        "waiters",
        f"{WAITERS} threads or asyncio tasks of one process wait",
        METRICS,
        (
            _subject(bench, OURS, OURS, one),
            _subject(bench, f"{OURS}, many names", OURS, many, names=WAITERS),
            _subject(bench, f"{OURS}, tasks", TASKS, "tasks for one name"),
            _subject(
                bench,
                f"{OURS}, tasks, many names",
                TASKS,
                "tasks, each for its own name",
                names=WAITERS,
            ),
            _subject(bench, "redis-py Lock", "redis-py Lock", one),
            _subject(bench, "python-redis-lock", "python-redis-lock", one),
        ),
        rounds=1,
        seconds=55,
    )


def _subject(bench: Bench, name: str, kind: str, options: str, *, names: int = 1) -> Subject:
    @contextlib.contextmanager
    def ready() -> Iterator[Session]:
        if kind != TASKS:
            # Raises if it is not installed.
            catalogue.kind(kind).make(DIRECT)
        yield _Waiting(bench, kind, names)

    return Subject(name, "ours" if name.startswith(OURS) else "peer", options, ready)


class _Waiting(Session):
    def __init__(self, bench: Bench, kind: str, names: int) -> None:
        self._bench, self._kind, self._names = bench, kind, names

    def once(self) -> Readings:
        from redis import Redis

        bench, watched = self._bench, WATCH if self._names == 1 else WATCH_MANY
        bench.clear()
        with Redis.from_url(bench.redis.url) as asking, Worker() as worker:
            before = len(asking.client_list())
            worker.call(f"{__name__}:wait", self._kind, self._names)
            time.sleep(SETTLE)
            cpu = processor.used(worker.pid) + bench.server_spent()
            commands = server_commands(asking)
            time.sleep(watched)
            commands = server_commands(asking) - commands - 1
            cpu = processor.used(worker.pid) + bench.server_spent() - cpu
            connections = len(asking.client_list()) - before
            waiting = worker.call(f"{__name__}:waiting")
        bench.clear()
        return {
            "commands": commands / watched,
            "cpu_per_second": cpu / watched,
            "connections": connections,
            "still_waiting": waiting,
        }


# -- in the worker --------------------------------------------------------------------------


def wait(kind: str, names: int) -> None:
    """Hold the names, and begin to wait for them; called in a worker, which is killed later."""
    make = catalogue.maker(OURS if kind == TASKS else kind, DIRECT)
    for number in range(names):
        handle = make(f"waited:{number}")
        handle.acquire()
        _held.append(handle)
    if kind != TASKS:
        for number in range(WAITERS):
            handle = make(f"waited:{number % names}")
            threading.Thread(target=_wait, args=(handle,), daemon=True).start()
    else:
        threading.Thread(target=asyncio.run, args=(_tasks(names),), daemon=True).start()


def waiting() -> int:
    return len(_waiting)


_held: list[object] = []
"""Keeps the handles, because garbage-collected ones lose their leases."""
_waiting: set[object] = set()


def _wait(handle: peers.Handle) -> None:
    _waiting.add(handle)
    # An error also ends the waiting, and is counted.
    with contextlib.suppress(Exception):
        handle.acquire()
    _waiting.discard(handle)


async def _tasks(names: int) -> None:
    from django_dlock import Lock

    async def task(number: int) -> None:
        lock = Lock(f"waited:{number % names}", wait=None)
        _waiting.add(lock)
        with contextlib.suppress(Exception):
            await lock.aacquire()
        _waiting.discard(lock)

    await asyncio.gather(*map(task, range(WAITERS)))
