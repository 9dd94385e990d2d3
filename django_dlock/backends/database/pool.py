"""A limited number of connections, shared by the threads of this process; calls have deadlines.

Of ``limit`` connections, one is reserved for renewals and one for calls that end a lease, so that
neither waits behind acquires. Nothing here takes a lock that a fork, a signal handler or a
finalizer could find held.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar, get_args

from ... import clock
from ..connector import Connector
from ..slots import Slots
from .connection import Connection, Failure, connect_failure
from .deadlines import deadlines

__all__ = ["FEWEST", "Pool", "Urgency"]

T = TypeVar("T")

Urgency = Literal["ordinary", "end", "renew"]
"""``ordinary`` is anything but ending a lease or renewing leases. The most urgent is last."""
URGENCIES: tuple[Urgency, ...] = get_args(Urgency)
FEWEST = 3
"""The least number of connections that a pool needs."""
REPEATABLE = ("broken", "overtaken", "transient", "read-only")
"""Kinds of failures after which a call may succeed if it is repeated."""
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two attempts; the first repetition follows at once."""


class Pool:
    """At most ``limit`` connections; further callers wait their turn."""

    def __init__(self, make: Callable[[], Connection], limit: int) -> None:
        self._limit, self._generation = limit, 0
        self._connector = Connector(partial(_connect, make))
        self._idle: collections.deque[Connection] = collections.deque()
        self.forget()

    def forget(self) -> None:
        """Leave all connections to the parent; called in a forked child."""
        for connection in self._idle:
            connection.leave_to_parent()
        self._idle = collections.deque()
        self._connector.forget()
        self._slots = Slots(self._limit - 2, 1, 1)

    def close(self) -> None:
        """Close idle connections now, and the others when their calls end."""
        self._generation += 1
        self._connector.forget()
        while self._idle:
            self._idle.pop().close()

    def call(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T:
        """Call ``use`` with a connection; repeat until the deadline while a repetition can help.

        Args:
            use: May be called again, so it must be idempotent.

        Raises:
            Failure: No answer, or a refusal.
        """
        slot = self._slots.take(URGENCIES.index(urgency), deadline)
        if slot is None:
            error = TimeoutError("no connection was free within the time allowed")
            raise Failure("broken", error)
        try:
            connection, pause, refused = self._idle_connection(), 0.0, None
            while True:
                try:
                    return self._use(connection or self.connect(deadline), use, deadline)
                except Failure as error:
                    refused = error if error.kind == "read-only" else refused
                    may_help = error.kind in REPEATABLE and not error.obstacle
                    if not may_help or clock.now() + pause >= deadline:
                        if refused is not None:
                            # The earlier error says more than a timeout does.
                            raise refused from refused.__cause__
                        raise
                    # If this one broke, do not try another idle one: those are as old.
                    of_use = error.kind in ("overtaken", "transient")
                    connection = self._idle_connection() if of_use else None
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
        finally:
            slot.release()

    def _use(self, connection: Connection, use: Callable[[Connection], T], deadline: float) -> T:
        intact, generation = False, self._generation
        try:
            connection.deadline = deadline
            deadlines.begin(connection, deadline)
            try:
                answer = use(connection)
                intact = True
                return answer
            except Failure as error:
                # A server may have become a standby; a new connection may lead to the new primary.
                intact = error.kind not in ("broken", "read-only")
                raise
            finally:
                intact = deadlines.end(connection) and intact
        finally:
            if intact and generation == self._generation:
                self._idle.append(connection)
            else:
                # Runs after an interrupt, too.
                connection.close()

    def _idle_connection(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def connect(self, deadline: float) -> Connection:
        """Make a new connection, which the caller must close or keep.

        Raises:
            Failure: No connection could be made, or not in time.
        """
        connection = self._connector.connect(deadline)
        if connection is None:
            raise Failure("broken", TimeoutError("no connection within the time allowed"))
        return connection


def _connect(make: Callable[[], Connection]) -> Connection:
    try:
        return make()
    except Failure:
        raise
    except Exception as error:
        raise connect_failure(error) from error
