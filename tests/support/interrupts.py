"""Interrupts locks at random moments; runs in a separate process because of the signals."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import signal
import statistics
import sys
import time
from types import FrameType
from typing import Any, Literal

from django_dlock import Lock

How = Literal["with", "try"]


class SoftLimit(Exception):
    """Raised by a signal handler, like Celery's soft time limit."""


ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
    "SoftLimit": SoftLimit,
}


def one(name: str, how: How) -> None:
    """Acquire and release as users do; afterwards the handle is garbage."""
    if how == "with":
        with Lock(name):
            pass
        return
    lock = Lock(name)
    if lock.acquire():
        try:
            pass
        finally:
            lock.release()


def storm(error: str, how: How, *, rounds: int, seed: int, name: str = "") -> int:
    """Interrupt ``rounds`` locks; return how many interrupts arrived inside.

    Args:
        name: Of all locks; by default each has its own, ``storm:0`` and so on.
    """
    moments = random.Random(seed)
    kind = ERRORS[error]

    armed = False

    def interrupt(*_: Any) -> None:
        # A signal may arrive late, from another thread.
        if armed:
            raise kind

    signal.signal(signal.SIGALRM, interrupt)
    one(name or "storm", how)
    took = []
    for _ in range(10):
        started = time.perf_counter()
        one(name or "storm", how)
        took.append(time.perf_counter() - started)
    usual = statistics.median(took)
    interrupted = 0
    for number in range(rounds):
        # An interrupted call drops its connection; the next call should not have to reconnect.
        one(name or "storm", how)
        armed = True
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 1.2 * usual))
            one(name or f"storm:{number}", how)
            armed = False
        except (kind, RuntimeError) as caught:
            # An interrupt inside one of Python's own waits becomes "release unlocked lock".
            if not isinstance(caught, kind) and not isinstance(caught.__context__, kind):
                raise
            interrupted += 1
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    gc.collect()
    return interrupted


class _Nth:
    """Raises at the n-th point where Python checks for signals: at the entry of a Python function
    and at the return from a C function."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.where = ""

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return") and not _before(frame):
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt


def _before(frame: FrameType) -> bool:
    """Whether a release has only just been entered, which counts as not called yet."""
    back = frame.f_back
    return back is not None and back.f_code is walk.__code__ and frame.f_code in _ENDS


_ENDS = (Lock.__exit__.__code__, Lock.release.__code__)


def walk(how: How) -> dict[str, str]:
    """Interrupt at every point between acquire and release, one after the other.

    The handles stay alive. Returns the names and where they were interrupted.
    """
    interrupted: dict[str, str] = {}
    for number in itertools.count(1):
        # The last interrupt may have dropped the connection. Opening a new one passes additional
        # points, which would shift all others.
        one("walk", how)
        lock = Lock(f"walk:{number}")
        kept.append(lock)
        nth = _Nth(number)
        try:
            sys.setprofile(nth.profile)
            if how == "with":
                with lock:
                    pass
            else:
                lock.acquire()
                lock.release()
        except (KeyboardInterrupt, RuntimeError):
            # An interrupt inside one of Python's own waits becomes the RuntimeError "release
            # unlocked lock".
            interrupted[lock.name] = nth.where
        finally:
            sys.setprofile(None)
        if not nth.where:
            break
    return interrupted


kept: list[Lock] = []


async def cancellations(how: How, *, rounds: int, seed: int) -> int:
    """As ``storm``, by cancelling tasks."""
    moments = random.Random(seed)

    async def body(name: str) -> None:
        if how == "with":
            async with Lock(name):
                pass
            return
        lock = Lock(name)
        if await lock.aacquire():
            try:
                pass
            finally:
                await lock.arelease()

    async def turns(task: asyncio.Task[None], limit: float = math.inf) -> int:
        """Let the loop run until the task is done, or for so many turns."""
        count = 0
        while not task.done() and count < limit:
            await asyncio.sleep(0)
            count += 1
        return count

    usual = statistics.median([await turns(asyncio.create_task(body("storm"))) for _ in range(10)])
    interrupted = 0
    for number in range(rounds):
        task = asyncio.create_task(body(f"storm:{number}"))
        await turns(task, moments.uniform(0, usual))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            interrupted += 1
    del task
    gc.collect()
    return interrupted


def all_free(rounds: int, timeout: float) -> bool:
    """Whether all names of a storm can be acquired within ``timeout`` seconds in total."""
    end = time.monotonic() + timeout
    locks = [Lock(f"storm:{number}") for number in range(rounds)]
    return all(lock.acquire(timeout=max(0.0, end - time.monotonic())) for lock in locks)
