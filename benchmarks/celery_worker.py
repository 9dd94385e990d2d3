"""One Celery worker, through which the tasks of several subjects go in turns."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testproject.processes import OwnProcess

from . import tasks
from .counting import server_commands

__all__ = ["CeleryWorker", "Crew"]

PATIENCE = 60.0


class CeleryWorker(OwnProcess):
    """``celery worker`` as a process of our own; surroundings come by the environment."""

    def __init__(self, pool: str, concurrency: int) -> None:
        super().__init__("dlock-worker-")
        self._options = ["-P", pool, "-c", str(concurrency)]

    def _launch(self) -> None:
        tasks.notes.delete(tasks.READY)
        celery = [sys.executable, "-m", "celery", "--workdir", str(Path(__file__).parents[1])]
        celery += ["-A", "benchmarks.tasks", "worker", *self._options]
        # A line of log for each task would cost all of them the same, and so hide differences.
        celery += ["-l", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        # What goes wrong before there is a logger goes to the log, too.
        self._spawn(["sh", "-c", 'exec "$@" > "$0" 2>&1', str(self.log), *celery])

    def _answers(self) -> bool:
        return bool(tasks.notes.exists(tasks.READY))


class Crew:
    """A worker that the subjects of one row share; started by the first batch.

    What is published before waits for it, so that commands can be counted at a server at which
    nobody else is busy.
    """

    def __init__(self, pool: str, concurrency: int) -> None:
        self._worker, self._concurrency = CeleryWorker(pool, concurrency), concurrency
        self._members = 0
        # No order comes twice: a peer's duplicate would not be published.
        self._orders = itertools.count()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The worker goes with the last of its subjects."""
        self._members += 1
        try:
            yield
        finally:
            self._members -= 1
            if not self._members:
                self._worker.stop()

    def publish(self, name: str, count: int) -> float:
        """Publish so many messages; seconds for each."""
        delay = tasks.TASKS[name].delay
        began = time.perf_counter()
        for order in itertools.islice(self._orders, count):
            delay(order)
        return (time.perf_counter() - began) / count

    def commands(self, name: str, count: int = 20) -> float:
        """How many commands the server runs for each ``delay()``."""
        # Connects, and declares the queue.
        self.publish(name, 1)
        before = server_commands(tasks.notes)
        self.publish(name, count)
        return (server_commands(tasks.notes) - before - 1) / count

    def batch(self, name: str, count: int) -> tuple[float, float]:
        """Seconds for publishing a message, and for running it."""
        self._worker.start()
        for _ in range(self._concurrency):
            tasks.gate.delay()
        publishing = self.publish(name, count)
        tasks.mark.delay()
        tasks.notes.rpush(tasks.GATE, *[1] * self._concurrency)
        began = max(self._hear(tasks.AT_GATE) for _ in range(self._concurrency))
        return publishing, (self._hear(tasks.ENDS) - began) / count

    @staticmethod
    def _hear(what: str) -> float:
        heard: Any = tasks.notes.blpop([what], timeout=PATIENCE)
        if heard is None:
            raise RuntimeError(f"nothing of {what} within {PATIENCE:g} s")
        return float(heard[1])
