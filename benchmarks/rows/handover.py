"""How long a name is nobody's: from ``release()`` in one process to ``acquire()`` in another.

Two processes take turns. One holds, the other is blocked in its acquire; after a random pause
the holder notes the time and releases, the waiter notes the time when it has acquired. Both
read the same monotonic clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import peers
from ..model import OURS, Metric, Readings, Row, Session, Subject
from ..peers import COUNTED, DIRECT, TOKEN, Handle, Kind, Where

if TYPE_CHECKING:
    from ..bench import Bench
    from ..processes import Worker

CONTENDERS = (
    TOKEN,
    OURS,
    "redis-py Lock",
    "django-redis",
    "python-redis-lock",
    "pottery Redlock",
    "django-pglock",
)
SETTLED = 0.01
"""Seconds after which the waiter surely waits."""
WATCHED = 1.0
"""Seconds during which a waiter's commands are counted."""


def rows(bench: Bench) -> Iterator[Row]:
    yield Row(
        "handover",
        "call of release() in one process to acquire() returning in another",
        (
            Metric("latency", "s", floor=TOKEN, percentiles=(90,)),
            # Per second of a wait that goes on: how much it polls.
            Metric("commands_waiting"),
        ),
        tuple(_subject(bench, peers.kind(name)) for name in CONTENDERS),
        rounds=5,
        seconds=27,
    )


def _subject(bench: Bench, kind: Kind) -> Subject:
    @contextmanager
    def open_() -> Iterator[Session]:
        pair = _Pair(bench, kind)
        yield pair
        pair.end()

    return Subject(kind.name, kind.role, kind.options, open_)


class _Pair(Session):
    def __init__(self, bench: Bench, kind: Kind) -> None:
        self._bench, self._kind, self._name = bench, kind, f"handover:{kind.name}"
        self._holder, self._waiter = bench.workers.take(2)
        # Whoever polls must not always be met in the same phase.
        self._spread = kind.polls or SETTLED
        self._samples = bench.size(5 if kind.polls else 20, least=2)
        peers.prime(kind, self._name)
        self._do(self._holder, "acquire")
        self._pass_on()
        self._pass_on()

    def once(self) -> Readings:
        # The waiter connects.
        self._pass_on(COUNTED)
        self._start(self._waiter, "acquire", COUNTED)
        time.sleep(0.3)
        with self._bench.counting() as counted:
            time.sleep(WATCHED)
        self._do(self._holder, "release")
        self._waiter.receive()
        self._holder, self._waiter = self._waiter, self._holder
        return {"commands_waiting": counted.commands / WATCHED}

    def round(self) -> Readings:
        samples: list[float] = []
        while len(samples) < self._samples:
            latency, waited = self._pass_on()
            # On a busy machine the waiter may have come so late that nothing was handed over.
            if waited > SETTLED / 2:
                samples.append(latency)
        return {"latency": samples}

    def end(self) -> None:
        self._do(self._holder, "release")

    def _pass_on(self, where: Where = DIRECT) -> tuple[float, float]:
        """Seconds that it took, and those that the waiter had waited before."""
        self._start(self._waiter, "acquire", where)
        time.sleep(SETTLED + random.uniform(0, self._spread))
        released_at = self._do(self._holder, "release")
        asked_at, acquired_at = self._waiter.receive()
        self._holder, self._waiter = self._waiter, self._holder
        return acquired_at - released_at, released_at - asked_at

    def _start(self, worker: Worker, verb: str, where: Where = DIRECT) -> None:
        worker.send(f"{__name__}:{verb}", self._kind.name, where, self._name)

    def _do(self, worker: Worker, verb: str) -> Any:
        self._start(worker, verb)
        return worker.receive()


# -- in the workers -------------------------------------------------------------------------

_held: dict[str, Handle] = {}


def acquire(kind: str, where: Where, name: str) -> tuple[float, float]:
    """Answers when it began, and when it had it."""
    handle = peers.maker(kind, where)(name)
    asked_at = time.monotonic()
    handle.acquire()
    acquired_at = time.monotonic()
    _held[name] = handle
    return asked_at, acquired_at


def release(kind: str, where: Where, name: str) -> float:
    """Answers when it began."""
    handle = _held.pop(name)
    released_at = time.monotonic()
    handle.release()
    return released_at
