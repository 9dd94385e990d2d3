"""Connections to one Redis, shared by the threads of this process; every call has a deadline.

redis-py's pool is not used: it gives a broken connection to the next caller, and has no deadlines.
This one uses no thread lock, which a fork, a signal handler or a finalizer could find locked.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from redis import exceptions as errors

from ... import clock
from ..connector import Connector
from ..slots import Slot, Slots
from .connection import Connection, ConnectionBroken, ErrorReply, is_broken_handshake
from .polling import Spin
from .route import Route

__all__ = ["Pool"]

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two attempts; the second attempt follows at once."""
ORDINARY, URGENT = 0, 1
"""The urgencies of calls; urgent ones renew or end leases."""


class Pool:
    """At most ``limit`` connections; further callers queue.

    A quarter of them is reserved for urgent calls, which renew or end leases, so that those never
    queue behind calls that acquire one.

    Args:
        route: Builds connections of redis-py without connecting them.
    """

    def __init__(self, route: Route, limit: int) -> None:
        self._limit = limit
        self._connector = Connector(partial(_connect, route, Spin()))
        self.after_fork()

    def after_fork(self) -> None:
        """Discard all connections, which belong to the parent; runs in a forked child."""
        # Last in, first out, so that the server closes connections that are not needed. In a
        # child, finalizers close only its own descriptors, without a message to the server.
        self._idle: collections.deque[Connection] = collections.deque()
        self._connector.forget()
        urgent = max(1, self._limit // 4)
        self._slots = Slots(self._limit - urgent, urgent)

    def close(self) -> None:
        """Close idle connections, and discard attempts that took too long for their callers."""
        self._connector.forget()
        while (connection := self._idle_connection()) is not None:
            connection.close()

    # -- calls -------------------------------------------------------------------------

    def call(self, use: Callable[[Connection], T], deadline: float, *, urgent: bool) -> T:
        """Call ``use`` with a connection; repeat it until the deadline if that can help.

        It can help if a connection broke or the server is not ready yet, but not if no
        connection can be made: then another server is needed, or another setting.

        Args:
            use: May be called several times, so what it sends must be idempotent.

        Raises:
            redis.exceptions.RedisError, OSError: No reply, or the reply is an error.
        """
        slot = self.take(deadline, urgent=urgent)
        try:
            connection, pause = self._idle_connection(), 0.0
            while True:
                try:
                    return self._use(connection or self.connect(deadline), use)
                except ConnectionBroken:
                    if clock.now() + pause >= deadline:
                        raise
                    # Make a new one: other idle ones are as old, and probably broken, too.
                    connection = None
                except ErrorReply as error:
                    if not error.is_transient or clock.now() + pause >= deadline:
                        raise
                    connection = self._idle_connection()
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
        finally:
            slot.release()

    def _use(self, connection: Connection, use: Callable[[Connection], T]) -> T:
        try:
            answer = use(connection)
        except ErrorReply:
            self.keep(connection)
            raise
        except BaseException:
            # This includes interrupts.
            connection.close()
            raise
        self.keep(connection)
        return answer

    # -- slots and connections ---------------------------------------------------------

    def take(self, deadline: float, *, urgent: bool) -> Slot:
        """Wait for a free slot.

        Raises:
            redis.exceptions.TimeoutError: None was free by the deadline.
        """
        slot = self._slots.take(URGENT if urgent else ORDINARY, deadline)
        if slot is None:
            raise errors.TimeoutError("no connection was free within the time allowed")
        return slot

    def take_idle(self) -> tuple[Slot, Connection] | None:
        """A slot and an idle connection, if both are there now; else ``None``."""
        slot = self._slots.take_now(URGENT)
        if slot is None:
            return None
        connection = self._idle_connection()
        if connection is None:
            slot.release()
            return None
        return slot, connection

    def keep(self, connection: Connection) -> None:
        """Keep it for the next caller, or close it if something is left to be sent or read."""
        if connection.is_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def _idle_connection(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def connect(self, deadline: float) -> Connection:
        """A new connection, which the caller has to ``keep`` or close.

        Raises:
            ConnectionBroken: It broke before it could be used.
            redis.exceptions.RedisError, OSError: It cannot be made, or not in time.
        """
        connection = self._connector.connect(deadline)
        if connection is None:
            raise errors.TimeoutError("no connection within the time allowed")
        return connection


def _connect(route: Route, spin: Spin) -> Connection:
    """A connection to the first of the servers that can be reached."""
    for others in reversed(range(len(route))):
        client = route()
        try:
            client.connect()
            return Connection(client, spin, route)
        except Exception as error:
            route.avoid()
            if others:
                continue
            if is_broken_handshake(error):
                raise ConnectionBroken(str(error)) from error
            raise
    raise AssertionError("there is always one server")
