"""Stops a running body from another thread, and nothing but the body.

CPython can set an exception in another thread (``PyThreadState_SetAsyncExc``). It takes a
class, lands between any two bytecodes, may be swallowed by an ``except Exception``, and waits
for a call into C to return. So it is repeated until the body ends, and must never strike
outside it: not in COMMIT, not in a release, not in our own records.

A COMMIT or a release of the body's own is left alone, too, as far as can be seen from here: it
may begin between the look and the strike.

Where gevent has put greenlets in the place of threads, it is thrown into the body's greenlet,
which then hears of it where it waits.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from celery.exceptions import Ignore
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic

from ..exceptions import LeaseLost
from ..lock import Lock
from . import greenlets

__all__ = ["BodyGuard", "LeaseAborted"]

logger = logging.getLogger("django_dlock")

T = TypeVar("T")

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0


class LeaseAborted(LeaseLost, Ignore):
    """The lease was lost, so the body that runs under it is stopped.

    Also an ``Ignore``, for Celery's automatic retries let only its own predicates pass, and a
    stopped run must not publish a retry beside its message.
    """

    def __init__(
        self,
        message: str = "The lease was lost while the task was running",
        name: str = "",
        alias: str = "",
        reason: str = "",
    ) -> None:
        super().__init__(message, name, alias, reason)


class BodyGuard:
    """Runs one body; ``interrupt`` may be called from any thread, before, during and after.

    Attributes:
        reason: Why the lease was lost; ``None`` while it is not.
        strikes: How often the body was interrupted.
    """

    def __init__(self) -> None:
        # Plain, because only a lock written in C is taken and given back by ``with`` without a
        # moment in between at which an exception would leave it locked for ever.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: int | None = None
        self._greenlet: greenlets.Greenlet | None = None
        self._closing = False
        self.reason: str | None = None
        self.strikes = 0

    @property
    def struck(self) -> bool:
        """Whether the body has been interrupted."""
        return self.strikes > 0

    def run(self, body: Callable[[], T]) -> T:
        """Call ``body``; when this returns or raises, nothing will strike any more.

        Raises:
            LeaseAborted: The lease was lost before the body began, or while it ran; also where
                the body caught the interruption and returned, for something in it was cut.
        """
        late = 0
        try:
            self._begin()
            value = body()
        finally:
            # Before anything is called: between ``finally`` and ``try`` nothing can strike. Once
            # it is stored nobody does, but one exception may be on its way.
            self._closing = True
            try:
                self._close()
            except LeaseAborted:
                late = 1
                self._close()
            except BaseException:
                # The soft time limit, at the only moment between body and record.
                self._close()
                raise
            finally:
                self._ended.set()
        if self.strikes > late:
            raise LeaseAborted(reason=self.reason or "")
        return value

    def interrupt(self, lock: Lock, reason: str) -> None:
        """The ``on_lost`` of the lock."""
        with self._lock:
            self.reason = reason
        # Not on the thread of all events: a body may go on for long before it notices.
        threading.Thread(target=self._insist, name="dlock-abort", daemon=True).start()

    def _begin(self) -> None:
        with self._lock:
            if self.reason is not None:
                raise LeaseAborted(reason=self.reason)
            self._greenlet = greenlets.current()
            self._thread = threading.get_ident()

    def _close(self) -> None:
        # Whoever was about to strike has done so once we have the lock.
        with self._lock:
            pass
        # What is on its way is raised in this loop at the latest. It could be taken back
        # instead, by setting NULL; but that leaves CPython looking for an exception that is
        # not there, for ever, in which 3.11 hangs under a tracer.
        for _ in range(2):
            pass

    def _insist(self) -> None:
        pause = FIRST_PAUSE
        while self._strike() and not self._ended.wait(pause):
            pause = min(2 * pause, LONGEST_PAUSE)

    def _strike(self) -> bool:
        with self._lock:
            if self._thread is None or self._closing:
                return False
            if self._greenlet is not None:
                self._greenlet.call_from_hub(self._throw)
                return True
            if _is_ending_something(sys._current_frames().get(self._thread)):
                return True
            self.strikes += 1
            if _raise_in(self._thread, LeaseAborted):
                return True
            self.strikes -= 1
        logger.warning("A task that lost its lease cannot be stopped in this pool; it goes on")
        return False

    def _throw(self) -> None:
        # While the hub calls this no greenlet runs, so the body has not ended since we looked;
        # nor does anything that follows it wait.
        if self._greenlet is None or self._closing:
            return
        if not _is_ending_something(self._greenlet.frame):
            self.strikes += 1
            self._greenlet.throw(LeaseAborted)


def _codes(*functions: Any) -> tuple[Any, ...]:
    return tuple(inspect.unwrap(function).__code__ for function in functions)


_ENDS = _codes(Atomic.__exit__, BaseDatabaseWrapper.commit, Lock.__exit__, Lock.release)
_BODY = _codes(BodyGuard.run)


def _is_ending_something(frame: FrameType | None) -> bool:
    """Whether a body is in the middle of a COMMIT, a ROLLBACK or a release."""
    # Not further up: a task in eager mode may itself run after somebody's COMMIT.
    while frame is not None and frame.f_code not in _BODY:
        if frame.f_code in _ENDS:
            return True
        frame = frame.f_back
    return False


def _raise_in(thread: int, kind: type[BaseException]) -> bool:
    """Raise ``kind`` in a thread, soon; false where CPython does not know the thread."""
    return bool(
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
    )
