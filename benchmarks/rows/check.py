"""What it costs to ask whether one still holds."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import peers
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject
from ..peers import DIRECT

if TYPE_CHECKING:
    from ..bench import Bench

Questions = Mapping[str, Callable[[], object]]


def rows(bench: Bench) -> Iterator[Row]:
    def subject(name: str, role: Role, options: str, ask: Callable[[Any], Questions]) -> Subject:
        @contextmanager
        def open_() -> Iterator[Session]:
            lock: Any = peers.kind(name).make(DIRECT)(f"check:{name}")
            lock.acquire()
            yield _Asked(bench, ask(lock), fast=role == "ours")
            lock.release()

        return Subject(name, role, options, open_)

    yield Row(
        "check",
        "does this handle still hold; one call",
        (Metric("check", "s"), Metric("held", "s"), Metric("remaining", "s")),
        (
            subject(OURS, "ours", "check(), held, remaining", _ours),
            subject("redis-py Lock", "peer", "owned(), which asks the server", _redis_py),
            subject("pottery Redlock", "peer", "locked(), which asks the server", _pottery),
        ),
        rounds=15,
        seconds=4,
    )


class _Asked(Session):
    def __init__(self, bench: Bench, questions: Questions, *, fast: bool) -> None:
        self._questions = questions
        self._number = bench.size(100_000) if fast else bench.size(100)

    def round(self) -> Readings:
        # The least of three: whatever comes between only adds.
        return {
            name: min(timeit.repeat(ask, number=self._number, repeat=3)) / self._number
            for name, ask in self._questions.items()
        }


def _ours(lock: Any) -> Questions:
    return {
        "check": lock.check,
        "held": lambda: lock.held,
        "remaining": lambda: lock.remaining,
    }


def _redis_py(lock: Any) -> Questions:
    return {"held": lock.owned}


def _pottery(lock: Any) -> Questions:
    return {"held": lock.locked, "remaining": lock.locked}
