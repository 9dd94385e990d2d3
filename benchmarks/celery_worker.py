"""One Celery worker that runs the tasks of several subjects in turns."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testproject.processes import OwnProcess

from . import processor, tasks
from .counting import server_commands

PATIENCE = 60.0


class CeleryWorker(OwnProcess):
    """``celery worker`` as our own process, configured by the environment."""

    def __init__(self, pool: str, concurrency: int) -> None:
        super().__init__("dlock-worker-")
        self._options = ["-P", pool, "-c", str(concurrency)]

    def _launch(self) -> None:
        tasks.notes.delete(tasks.READY)
        celery = [sys.executable, "-m", "celery", "--workdir", str(Path(__file__).parents[1])]
        celery += ["-A", "benchmarks.tasks", "worker", *self._options]
        # A log line per task would take the same time for all subjects, and so hide differences.
        celery += ["-l", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        # Errors before the logger exists go to the log, too.
        self._spawn(["sh", "-c", 'exec "$@" > "$0" 2>&1', str(self.log), *celery])

    def _answers(self) -> bool:
        return bool(tasks.notes.exists(tasks.READY))


@dataclass(frozen=True)
class Batch:
    """What one message of a batch cost.

    Attributes:
        publish, run: Seconds.
        cpu: Seconds of processor time of this process, the worker and the servers.
        at_server: Commands that the server ran, including the worker's own.
    """

    publish: float
    run: float
    cpu: float
    at_server: float


class SharedWorker:
    """A worker shared by the subjects of one row; started by the first batch.

    Messages published before that wait for it, so that commands can be counted at a server that
    nobody else uses.
    """

    def __init__(self, pool: str, concurrency: int, server_spent: Callable[[], float]) -> None:
        self._worker, self._concurrency = CeleryWorker(pool, concurrency), concurrency
        self._server_spent = server_spent
        self._pids: set[int] = set()
        self._members = 0
        # No order is repeated, because a peer would not publish a duplicate.
        self._orders = itertools.count()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Stop the worker after the last of its subjects."""
        self._members += 1
        try:
            yield
        finally:
            self._members -= 1
            if not self._members:
                self._worker.stop()
                self._pids.clear()

    def publish(self, name: str, count: int) -> float:
        """Publish ``count`` messages; return the seconds for each."""
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

    def batch(self, name: str, count: int) -> Batch:
        """Publish ``count`` messages, then let the worker run them."""
        if not self._pids:
            self._start()
        cpu, commands = self._spent(), server_commands(tasks.notes)
        for _ in range(self._concurrency):
            tasks.gate.delay()
        publishing = self.publish(name, count)
        tasks.mark.delay()
        began = max(moment for moment, _ in self._open_gates())
        running = (float(self._note(tasks.ENDS)) - began) / count
        cpu, commands = self._spent() - cpu, server_commands(tasks.notes) - commands - 1
        return Batch(publishing, running, cpu / count, commands / count)

    def _start(self) -> None:
        """Start the worker, and find out which processes run its tasks."""
        self._worker.start()
        for _ in range(self._concurrency):
            tasks.gate.delay()
        self._pids = {os.getpid(), self._worker.pid}
        self._pids |= {pid for _, pid in self._open_gates()}

    def _open_gates(self) -> list[tuple[float, int]]:
        """For each of the worker's processes or threads: when it continued, and its process."""
        tasks.notes.rpush(tasks.GATE, *[1] * self._concurrency)
        notes = [self._note(tasks.AT_GATE).split() for _ in range(self._concurrency)]
        return [(float(moment), int(pid)) for moment, pid in notes]

    def _spent(self) -> float:
        return self._server_spent() + sum(processor.used(pid) for pid in self._pids)

    @staticmethod
    def _note(what: str) -> str:
        note: Any = tasks.notes.blpop([what], timeout=PATIENCE)
        if note is None:
            raise RuntimeError(f"nothing of {what} within {PATIENCE:g} s")
        return str(note[1].decode())
