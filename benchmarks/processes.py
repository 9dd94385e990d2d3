"""Worker processes that run functions by name, for rows that need several holders."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import TYPE_CHECKING, Any

from . import parsers
from .model import Unavailable

if TYPE_CHECKING:
    from typing_extensions import Self

PRELOAD = ["benchmarks.settings", "redis", "django_dlock.lock"]
"""Import the settings first, because they choose redis-py's parser."""


class WorkerFailed(Exception):
    """A function raised in its worker, or the worker died; the message has its traceback."""

    @property
    def reason(self) -> str:
        """The last line: the error."""
        return str(self).strip().rpartition("\n")[2]


def clean() -> None:
    """Collect others' garbage, and freeze the rest, so that it costs the next subject nothing.

    This is the same before each turn of each subject, here and in workers. During the turn the
    collector runs as in production, over objects made by the subject itself.
    """
    gc.collect()
    gc.freeze()


def sleep_until(moment: float) -> None:
    """Wait until this ``time.monotonic()``, which all processes of a machine share."""
    time.sleep(max(0.0, moment - time.monotonic()))


def _serve(channel: Connection, parser: str) -> None:
    os.environ[parsers.VARIABLE] = parser
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
            channel.send((None, answer(*args)))
        except Unavailable as error:
            channel.send((Unavailable, str(error)))
        except Exception:  # noqa: BLE001 - the parent raises it
            channel.send((WorkerFailed, traceback.format_exc()))


class Worker:
    """One process with Django set up; a context manager.

    Args:
        fresh: A new interpreter with its own memory; otherwise one forked from a server that has
            imported Django, which starts at once.
        parser: See ``parsers``; a parser other than the parent's needs a new interpreter.
    """

    def __init__(self, *, fresh: bool = False, parser: str = parsers.PYTHON) -> None:
        context: SpawnContext | ForkServerContext
        if fresh:
            context = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOAD)
        self._channel, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, parser), daemon=True)
        self._process.start()
        its_end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Killed, because releasing hundreds of leases would take the next subject's time.
        self._process.kill()
        self._process.join()
        self._channel.close()

    def send(self, function: str, *args: Any) -> None:
        """Start ``"module:function"``; ``receive`` waits for what it returns."""
        self._channel.send((function, args))

    def receive(self, timeout: float = 60.0) -> Any:
        """Return the result. Raises ``Unavailable``, or ``WorkerFailed`` for all other errors.

        A missing answer is ``WorkerFailed``, too.
        """
        if not self._channel.poll(timeout):
            raise WorkerFailed(f"no answer within {timeout} s")
        try:
            failure, answer = self._channel.recv()
        except EOFError as error:
            raise WorkerFailed("the process died") from error
        if failure is not None:
            raise failure(answer)
        return answer

    def call(self, function: str, *args: Any, timeout: float = 60.0) -> Any:
        self.send(function, *args)
        return self.receive(timeout)


class Workers:
    """Processes that live as long as the run; the subjects use them one after the other."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def take(self, count: int) -> Sequence[Worker]:
        """The first ``count`` processes; starts more if there are too few."""
        while len(self._workers) < count:
            self._workers.append(Worker())
        return self._workers[:count]

    def run(self, count: int, function: str, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Let ``count`` processes run the function with their number as first argument."""
        workers = self.take(count)
        for number, worker in enumerate(workers):
            worker.send(function, number, *args)
        answers: list[Any] = []
        errors: list[Exception] = []
        for worker in workers:
            # Every answer must be read; otherwise it would count as the next one.
            try:
                answers.append(worker.receive(timeout))
            except (Unavailable, WorkerFailed) as error:  # noqa: PERF203
                errors.append(error)
        if errors:
            self.close()
            raise errors[0]
        return answers

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.__exit__()
