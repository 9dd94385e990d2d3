"""Worker processes that carry out functions by name, for rows that need several holders."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Worker", "WorkerFailed", "Workers", "clean", "sleep_until"]


class WorkerFailed(Exception):
    """A function raised in its worker, or the worker died; the message has its traceback."""

    @property
    def reason(self) -> str:
        """The last line: what was raised."""
        return str(self).strip().rpartition("\n")[2]


def clean() -> None:
    """Let nobody pay for what others left: collect, and look at the rest no more.

    The same before each turn of each subject, here and in workers; during the turn the
    collector runs as it does in production, over what the subject itself has made.
    """
    gc.collect()
    gc.freeze()


def sleep_until(moment: float) -> None:
    """Until ``time.monotonic()``, which all processes of a machine share, is there."""
    time.sleep(max(0.0, moment - time.monotonic()))


def _serve(channel: Connection) -> None:
    import django

    django.setup()
    while True:
        try:
            function, args = channel.recv()
        except EOFError:
            return
        try:
            module, _, attribute = function.partition(":")
            answer = getattr(importlib.import_module(module), attribute)
            clean()
            channel.send((True, answer(*args)))
        except Exception:  # noqa: BLE001 - whoever asked raises it
            channel.send((False, traceback.format_exc()))


class Worker:
    """One process with Django set up; a context manager.

    Args:
        fresh: A new interpreter, whose memory is its own; otherwise one forked from a server
            that has Django imported, which starts at once.
    """

    def __init__(self, *, fresh: bool = False) -> None:
        context: SpawnContext | ForkServerContext
        if fresh:
            context = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["django", "redis", "django_dlock.lock"])
        self._channel, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end,), daemon=True)
        self._process.start()
        its_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Killed: hundreds of leases given back in order would take the next one's time.
        self._process.kill()
        self._process.join()
        self._channel.close()

    def send(self, function: str, *args: Any) -> None:
        """Start ``"module:function"``; ``receive`` waits for what it returns."""
        self._channel.send((function, args))

    def receive(self, timeout: float = 60.0) -> Any:
        """Raises ``WorkerFailed``, also where there is no answer in time."""
        if not self._channel.poll(timeout):
            raise WorkerFailed(f"no answer within {timeout} s")
        try:
            succeeded, answer = self._channel.recv()
        except EOFError as error:
            raise WorkerFailed("the process died") from error
        if not succeeded:
            raise WorkerFailed(answer)
        return answer

    def call(self, function: str, *args: Any, timeout: float = 60.0) -> Any:
        self.send(function, *args)
        return self.receive(timeout)


class Workers:
    """Processes that live as long as the run and are used by one subject after the other."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def take(self, count: int) -> Sequence[Worker]:
        """The first ``count`` of them, started where there are too few."""
        while len(self._workers) < count:
            self._workers.append(Worker())
        return self._workers[:count]

    def run(self, count: int, function: str, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Let ``count`` of them do the same, each told its number first; all answers."""
        workers = self.take(count)
        for number, worker in enumerate(workers):
            worker.send(function, number, *args)
        answers, errors = [], []
        for worker in workers:
            # All are heard, so that no answer is taken for that to the next question.
            try:
                answers.append(worker.receive(timeout))
            except WorkerFailed as error:  # noqa: PERF203
                errors.append(error)
        if errors:
            self.close()
            raise errors[0]
        return answers

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.__exit__()
