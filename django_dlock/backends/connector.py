"""Makes connections on threads, so that a deadline covers name resolution and handshake, too."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .. import clock, process

T = TypeVar("T")


class Connector(Generic[T]):
    """Makes the connections of one pool.

    Args:
        make: Makes one connection; may take any time.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.forget()

    def forget(self) -> None:
        """Forget the attempts that took too long for their callers."""
        self._late: collections.deque[_Attempt[T]] = collections.deque()

    def connect(self, deadline: float) -> T | None:
        """A new connection, which the caller has to keep or close; ``None`` if it takes too long.

        Raises:
            BaseException: What ``make`` raised.
        """
        while True:
            # First use an attempt that an earlier caller stopped waiting for, so that threads do
            # not pile up while a name server hangs.
            try:
                attempt, mine = self._late.pop(), False
            except IndexError:
                attempt, mine = _Attempt(self._make), True
                attempt.begin()
            outcome = None
            try:
                if attempt.is_alive():
                    attempt.join(max(0.0, deadline - clock.now()))
            finally:
                # Read it only once: the attempt may end between two lines.
                outcome = attempt.outcome
                if outcome is None:
                    self._late.append(attempt)
            try:
                if not isinstance(outcome, BaseException):
                    return outcome
                # What an earlier caller's attempt met may be over by now, so try again.
                if mine:
                    raise outcome
            finally:
                # The error's traceback refers to this frame: a cycle.
                del attempt, outcome


class _Attempt(threading.Thread, Generic[T]):
    """Makes one connection.

    Attributes:
        outcome: The connection, or why there is none; ``None`` until then.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        super().__init__(name="dlock-connect", daemon=True)
        self._make = make
        self.outcome: T | BaseException | None = None

    def begin(self) -> None:
        try:
            self.start()
        except RuntimeError:
            # No thread can start, for instance while the interpreter ends: connect here, so that
            # a last release can still be sent.
            self.run()

    def run(self) -> None:
        try:
            with process.connecting(ends=True):
                self.outcome = self._make()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            # The traceback refers to this frame, and so to this thread: a cycle.
            self.outcome = error.with_traceback(None)
