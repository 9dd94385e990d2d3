"""What a thousand waiters of one process cost the server: connections, and commands in vain."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import peers
from ..counting import server_commands
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject
from ..peers import DIRECT
from ..processes import Worker

if TYPE_CHECKING:
    from ..bench import Bench

WAITERS = 1000
SETTLE, WATCH, PERIOD = 3.0, 3.0, 10.0
"""Seconds for coming to wait, and for being watched: where all ask again after a while, long
enough to see it."""

METRICS = (
    Metric("connections"),
    # All of them together, those inside scripts included, while nothing is released.
    Metric("commands", "/s"),
    # How many are still at it after some seconds.
    Metric("still_waiting", better="higher"),
)

PEERS = ("redis-py Lock", "python-redis-lock")


def rows(bench: Bench) -> Iterator[Row]:
    yield Row(
        "waiters.threads",
        f"{WAITERS} threads of one process wait",
        METRICS,
        (
            _subject(bench, OURS, "ours", OURS, names=1, how="for one name"),
            _subject(
                bench, f"{OURS}, many names", "ours", OURS, names=WAITERS, how="each its own name"
            ),
            *(
                _subject(bench, name, "peer", name, names=1, how="for one name; its own defaults")
                for name in PEERS
            ),
        ),
        rounds=1,
        seconds=35,
    )
    yield Row(
        "waiters.tasks",
        f"{WAITERS} asyncio tasks of one process wait",
        METRICS,
        (
            _subject(bench, OURS, "ours", "", names=1, how="for one name"),
            _subject(
                bench, f"{OURS}, many names", "ours", "", names=WAITERS, how="each its own name"
            ),
        ),
        rounds=1,
        seconds=22,
    )


def _subject(bench: Bench, name: str, role: Role, kind: str, *, names: int, how: str) -> Subject:
    @contextlib.contextmanager
    def ready() -> Iterator[Session]:
        if kind:
            # Says so where it is not installed.
            peers.kind(kind).make(DIRECT)
        yield _Waiting(bench, kind, names)

    return Subject(name, role, how, ready)


class _Waiting(Session):
    def __init__(self, bench: Bench, kind: str, names: int) -> None:
        self._bench, self._kind, self._names = bench, kind, names

    def once(self) -> Readings:
        from redis import Redis

        self._bench.clear()
        watched = WATCH if self._names == 1 else PERIOD
        with Redis.from_url(self._bench.redis.url) as asking, Worker() as worker:
            before = len(asking.client_list())
            worker.call("benchmarks.rows.waiters:wait", self._kind, self._names)
            time.sleep(SETTLE)
            commands = server_commands(asking)
            time.sleep(watched)
            commands = server_commands(asking) - commands - 1
            connections = len(asking.client_list()) - before
            waiting = worker.call("benchmarks.rows.waiters:waiting")
        self._bench.clear()
        return {
            "connections": connections,
            "commands": commands / watched,
            "still_waiting": waiting,
        }


def wait(kind: str, names: int) -> None:
    """Hold the names, and begin to wait for them; called in a worker, which is killed later."""
    make = peers.maker(kind or OURS, DIRECT)
    for number in range(names):
        handle = make(f"waited:{number}")
        handle.acquire()
        _held.append(handle)
    if kind:
        for number in range(WAITERS):
            handle = make(f"waited:{number % names}")
            threading.Thread(target=_wait, args=(handle,), daemon=True).start()
    else:
        threading.Thread(target=asyncio.run, args=(_tasks(names),), daemon=True).start()


def waiting() -> int:
    return len(_waiting)


_held: list[object] = []
"""Handles that are collected give their leases up."""
_waiting: set[object] = set()


def _wait(handle: peers.Handle) -> None:
    _waiting.add(handle)
    # An error ends the waiting as well, and is counted as that.
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
