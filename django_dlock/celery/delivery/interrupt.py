"""Interrupts a running body from another thread, and nothing but the body.

CPython can raise an exception in another thread (``PyThreadState_SetAsyncExc``). The exception
can arrive between any two bytecodes; an ``except Exception`` can swallow it; and a call into C
delays it until the call returns. So it is repeated until the body ends. It must never arrive
outside the body: not in COMMIT, not in a release, not while the outcome is recorded.

A COMMIT or a release inside the body is not interrupted either, as far as possible: it may begin
between the check and the exception. A publish inside the body is never interrupted, and the
exception is raised right after it; see ``uninterrupted``.

If gevent has replaced threads by greenlets, the exception is thrown into the body's greenlet,
which gets it where it waits.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic

from ...exceptions import LeaseLost
from ...lock import Lock
from ...log import logger
from . import greenlets, uninterrupted

T = TypeVar("T")

uninterrupted.protect()

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0


class LeaseAborted(LeaseLost, Ignore):
    """The lease was lost, so the body is stopped.

    It is also an ``Ignore``, which Celery's automatic retries let pass: the message is requeued,
    and the run must not publish a retry as well.
    """

    def __init__(
        self,
        message: str = "The lease was lost while the task was running",
        name: str = "",
        alias: str = "",
        reason: str = "",
    ) -> None:
        super().__init__(message, name, alias, reason)


class BodyRunner:
    """Runs one body; ``interrupt`` may be called from any thread, before, during and after.

    Attributes:
        reason: Why the lease was lost; ``None`` as long as it is not.
        interruptions: How often the body was interrupted.
    """

    def __init__(self) -> None:
        # Not an RLock or a Condition: only with this lock, which is written in C, can no
        # exception between two bytecodes of ``with`` leave it locked for ever.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: int | None = None
        self._greenlet: greenlets.Greenlet | None = None
        self._closing, self._process = False, 0
        # The calls that must not be interrupted, and in which the body is.
        self._inside: set[object] = set()
        self._waits = False
        self._outer: uninterrupted.Runner | None = None
        self.reason: str | None = None
        self.interruptions = 0

    @property
    def interrupted(self) -> bool:
        """Whether the body has been interrupted."""
        return self.interruptions > 0

    @property
    def is_greenlet(self) -> bool:
        """Whether the body runs in one of gevent's greenlets instead of a thread."""
        return self._greenlet is not None

    def run(self, body: Callable[[], T]) -> T:
        """Call ``body``; after this returns or raises, nothing is interrupted any more.

        Raises:
            LeaseAborted: The lease was lost before the body began, or while it ran; even if the
                body caught the interruption and returned, because part of it did not run.
        """
        late, outer = 0, uninterrupted.begin(self)
        self._outer = outer
        try:
            self._begin()
            value = body()
        finally:
            # First of all, because no exception can arrive between ``finally`` and ``try``.
            # After this no further exception is sent, but one may still be pending.
            self._closing = True
            try:
                self._close()
            except LeaseAborted:
                late = 1
                self._close()
            except BaseException:
                # The soft time limit was raised between the body and the record.
                self._close()
                raise
            finally:
                self._ended.set()
                uninterrupted.end(outer)
        if self.interruptions > late:
            raise LeaseAborted(reason=self.reason or "")
        return value

    def uninterrupted(self, function: Callable[[], T]) -> T:
        """Call a function of the body; an interruption that comes meanwhile waits for its end.

        Raises:
            LeaseAborted: The function has returned or failed, and the body is to be stopped.
        """
        if os.getpid() != self._process:
            # Forked by the body. Nobody interrupts here, and the lock may have been held then.
            return function()
        if self._outer is not None:
            # The body of an eager task inside a body: neither may be interrupted.
            function = functools.partial(self._outer.uninterrupted, function)
        me = object()
        try:
            with self._lock:
                self._inside.add(me)
            _raise_pending()
            value = function()
        except (Ignore, Reject, Retry, SoftTimeLimitExceeded):
            # How the body ends is decided.
            raise
        except Exception as error:
            self._inside.discard(me)
            self._stop_if_due(error)
            raise
        finally:
            self._inside.discard(me)
        self._stop_if_due(None)
        return value

    def _stop_if_due(self, cause: BaseException | None) -> None:
        if self._waits and not self._inside:
            self._waits = False
            self.interruptions += 1
            raise LeaseAborted(reason=self.reason or "") from cause

    def interrupt(self, lock: Lock, reason: str) -> None:
        """The ``on_lost`` of the lock."""
        with self._lock:
            self.reason = reason
        # Not on the thread of ``on_lost``, because the body may take long to notice.
        threading.Thread(target=self._keep_interrupting, name="dlock-abort", daemon=True).start()

    def _begin(self) -> None:
        with self._lock:
            if self.reason is not None:
                raise LeaseAborted(reason=self.reason)
            self._greenlet = greenlets.current()
            self._thread, self._process = threading.get_ident(), os.getpid()

    def _close(self) -> None:
        # Wait for an interruption that another thread is sending right now.
        with self._lock:
            pass
        _raise_pending()

    def _keep_interrupting(self) -> None:
        pause = FIRST_PAUSE
        while self._interrupt_once() and not self._ended.wait(pause):
            pause = min(2 * pause, LONGEST_PAUSE)

    def _interrupt_once(self) -> bool:
        with self._lock:
            if self._thread is None or self._closing:
                return False
            if self._inside:
                self._waits = True
                return True
            if self._greenlet is not None:
                self._greenlet.call_from_hub(self._throw)
                return True
            if _is_committing_or_releasing(_frame_of(self._thread)):
                return True
            self.interruptions += 1
            if _raise_in(self._thread, LeaseAborted):
                return True
            self.interruptions -= 1
        logger.warning("A task lost its lease, but this pool cannot stop it; it continues")
        return False

    def _throw(self) -> None:
        # The hub calls this, so no greenlet is running: the body cannot end after this check,
        # and nothing that comes after the body waits here.
        if self._greenlet is None or self._closing:
            return
        if self._inside:
            self._waits = True
            return
        if not _is_committing_or_releasing(self._greenlet.frame):
            self.interruptions += 1
            self._greenlet.throw(LeaseAborted)


def _raise_pending() -> None:
    """Return only when no exception of another thread is pending for this one."""
    # It is raised in this loop at the latest. Clearing it with NULL instead would leave CPython's
    # flag for it set, and under a tracer Python 3.11 then hangs.
    for _ in range(2):
        pass


def _codes(*functions: Any) -> tuple[Any, ...]:
    return tuple(inspect.unwrap(function).__code__ for function in functions)


_ENDS = _codes(Atomic.__exit__, BaseDatabaseWrapper.commit, Lock.__exit__, Lock.release)
_BODY = _codes(BodyRunner.run)


def _is_committing_or_releasing(frame: FrameType | None) -> bool:
    """Whether a body is in the middle of a COMMIT, a ROLLBACK or a release."""
    # Stop at our own frame: an eager task may be called from inside its caller's COMMIT.
    while frame is not None and frame.f_code not in _BODY:
        if frame.f_code in _ENDS:
            return True
        frame = frame.f_back
    return False


_asking = threading.Lock()


def _frame_of(thread: int) -> FrameType | None:
    """The frame that a thread is executing."""
    if sys.version_info >= (3, 12):
        return sys._current_frames().get(thread)
    # Before Python 3.12, a garbage collection inside this call can deadlock the process
    # (python/cpython#106883). Newer versions collect garbage only between instructions.
    with _asking:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if enabled:
                gc.enable()


def _raise_in(thread: int, kind: type[BaseException]) -> bool:
    """Raise ``kind`` in a thread soon; returns ``False`` if CPython does not know the thread."""
    return bool(
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
    )
