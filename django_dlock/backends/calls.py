"""Makes a backend's blocking calls on a few threads, for callers that must not block."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .. import clock
from ..exceptions import ConnectionsBusy

__all__ = ["Calls"]

THREADS = 8
"""The most threads for urgent calls, and for others."""
IDLE = 10.0
"""Seconds without a call after which a thread ends."""

T = TypeVar("T")

Job = tuple[Callable[[], Any], "Future[Any]"]


class Calls:
    """The threads of one backend in one process.

    Urgent calls, which end or prolong a lease, have separate threads, so that they never queue
    behind others.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._urgent, self._ordinary = _Workers(), _Workers()

    def answered_at(self, *, urgent: bool) -> float:
        """When a call of this kind last ended with an answer, on ``clock.now()``."""
        return (self._urgent if urgent else self._ordinary).answered_at

    def submit(self, call: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Let a thread make the call, unless its future is cancelled before that."""
        future: Future[T] = Future()
        (self._urgent if urgent else self._ordinary).add((call, future))
        return future


class _Workers:
    def __init__(self) -> None:
        self._jobs: collections.deque[Job] = collections.deque()
        self._threads = self._idle = 0
        self.answered_at = float("-inf")
        # Reentrant: a finalizer may call this on a thread that is inside it. Enter the lock
        # itself and not the condition; see core/supervisor.py.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)

    def add(self, job: Job) -> None:
        with self._lock:
            self._jobs.append(job)
            self._ready.notify()
            # A notified thread counts as idle until it has taken its job.
            if len(self._jobs) <= self._idle or self._threads == THREADS:
                return
            try:
                threading.Thread(target=self._run, name="dlock-call", daemon=True).start()
                self._threads += 1
            except RuntimeError:
                # No thread can start while the interpreter ends, or beyond the system's limit.
                if not self._threads:
                    self._jobs.remove(job)
                    raise

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                while not self._jobs and self._ready.wait(IDLE):
                    pass
                self._idle -= 1
                if not self._jobs:
                    self._threads -= 1
                    return
                call, future = self._jobs.popleft()
            if _carry_out(call, future):
                self.answered_at = clock.now()
            # Do not keep them while waiting for the next job.
            del call, future


def _carry_out(call: Callable[[], Any], future: Future[Any]) -> bool:
    """Returns whether the backend has answered."""
    if not future.set_running_or_notify_cancel():
        return False
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        future.set_exception(error)
        # The error's traceback refers to this frame: without this, there would be a cycle.
        del future
        # Then the store has answered others.
        return isinstance(error, ConnectionsBusy)
    future.set_result(result)
    return True
