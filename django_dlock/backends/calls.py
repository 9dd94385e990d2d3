"""Makes a backend's blocking calls on a few threads, for callers that must not block."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .. import clock
from ..exceptions import BackendUnavailable, ConnectionsBusy

THREADS = 8
"""The most threads for urgent calls, and for others."""
IDLE = 10.0
"""Seconds without a call after which a thread ends."""
QUEUEING = 0.3
"""The part of a coroutine's call for which it may wait for a thread."""
THREAD_LATE = 0.1
"""Seconds by which the thread that makes a call may be late in telling how it ended."""

T = TypeVar("T")

Job = tuple[Callable[[], Any], "Future[Any]"]


class Calls:
    """The threads of one backend.

    Urgent calls, which end or prolong a lease, have separate threads, so that they never queue
    behind others.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._urgent, self._ordinary = _Workers(), _Workers()
        # Last: whoever finds this number, in another thread or after an interrupt, finds workers
        # of this process.
        self._pid = os.getpid()

    def submit(self, call: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Let a thread make the call, unless its future is cancelled before that."""
        if self._pid != os.getpid():
            # A forked child has none of its parent's threads.
            self._begin()
        future: Future[T] = Future()
        (self._urgent if urgent else self._ordinary).add((call, future))
        return future

    async def awaited(
        self, call: Callable[[], T], deadline: float, *, urgent: bool, alias: str
    ) -> T:
        """The answer, for a coroutine; ``BaseLockBackend.acall`` says what it raises."""
        answered: asyncio.Future[None] = (loop := asyncio.get_running_loop()).create_future()

        def tell(_: Future[Any]) -> None:
            # If the loop has been closed, no coroutine is waiting any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(answered.cancel)

        future = self.submit(call, urgent=urgent)
        future.add_done_callback(tell)
        try:
            began_at = clock.now()
            # The call itself needs most of the time.
            await asyncio.wait({answered}, timeout=max(0.0, QUEUEING * (deadline - began_at)))
            if not future.done():
                if not future.running() and future.cancel():
                    raise self._no_thread(began_at, urgent, alias)
                # The thread ends it by the deadline, and knows why.
                left = deadline + THREAD_LATE - clock.now()
                await asyncio.wait({answered}, timeout=max(0.0, left))
            if not future.done():
                raise BackendUnavailable("No answer within the time allowed", "", alias)
            return future.result()
        finally:
            future.cancel()
            # The traceback of its error refers to this frame, as in ``_carry_out``.
            del future

    def _no_thread(self, began_at: float, urgent: bool, alias: str) -> BackendUnavailable:
        """The error of a call for which no thread became free, so that nothing was sent."""
        busy = (self._urgent if urgent else self._ordinary).answered_at >= began_at
        kind = ConnectionsBusy if busy else BackendUnavailable
        what = "all threads that make calls" if busy else "calls that got no answer"
        error = kind(f"Nothing was sent: it waited behind {what}", "", alias)
        error.unsent = True
        return error


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
