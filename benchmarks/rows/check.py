"""The cost of asking whether a lock is still held."""

from __future__ import annotations

import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import catalogue
from ..model import OURS, Metric, Readings, Role, Row, Session, Subject
from ..peers import DIRECT, Handle

if TYPE_CHECKING:
    from ..bench import Bench

Questions = Mapping[str, str]
"""By the metric's name: the expression evaluated on ``lock``."""


def rows(bench: Bench) -> Iterator[Row]:
    def subject(name: str, role: Role, options: str, questions: Questions) -> Subject:
        @contextmanager
        def open_() -> Iterator[Session]:
            lock = catalogue.kind(name).make(DIRECT)(f"check:{name}")
            lock.acquire()
            yield _Asked(lock, questions, bench.size(10_000 if role == "ours" else 30))
            lock.release()

        return Subject(name, role, options, open_)

    ours = {"check": "lock.check()", "held": "lock.held", "remaining": "lock.remaining"}
    yield Row(
        "check",
        "does this handle still hold; one call",
        (Metric("check", "s"), Metric("held", "s"), Metric("remaining", "s")),
        (
            subject(OURS, "ours", "no I/O", ours),
            subject(
                "redis-py Lock", "peer", "owned(), which asks the server", {"held": "lock.owned()"}
            ),
            subject(
                "pottery Redlock",
                "peer",
                "locked(), which asks the server",
                {"held": "lock.locked()", "remaining": "lock.locked()"},
            ),
        ),
        rounds=15,
        seconds=6,
    )


class _Asked(Session):
    def __init__(self, lock: Handle, questions: Questions, number: int) -> None:
        self._lock, self._questions, self._number = lock, questions, number

    def round(self) -> Readings:
        return {name: self._time(question) for name, question in self._questions.items()}

    def _time(self, question: str) -> float:
        times = timeit.repeat(question, globals={"lock": self._lock}, number=self._number, repeat=9)
        # The minimum, because disturbances only add time.
        return min(times) / self._number
