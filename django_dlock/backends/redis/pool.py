"""Connections to one Redis, shared by the threads of this process; every call has a deadline.

redis-py's pool is not used: it gives a broken connection to the next caller, and has no deadlines.
The rules are those of ``backends/shared/pool.py``.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from redis import exceptions as errors

from ... import clock
from ..shared.pool import ConnectionPool, Verdict
from ..slots import Slot
from .connection import (
    Connection,
    ConnectionBroken,
    ErrorReply,
    NotConfirmed,
    NotDelivered,
    is_broken_handshake,
)
from .polling import Spin
from .route import Route

ORDINARY, URGENT = 0, 1
"""The urgencies of calls; urgent ones renew or end leases."""


class Pool(ConnectionPool[Connection]):
    """At most ``limit`` connections; further callers queue.

    A quarter of them is reserved for urgent calls, which renew or end leases, so that those never
    queue behind calls that acquire one.

    Args:
        route: Builds connections of redis-py without connecting them.
    """

    failures = (errors.RedisError, OSError)

    def __init__(self, route: Route, limit: int) -> None:
        urgent = max(1, limit // 4)
        super().__init__(partial(_connect, route, Spin()), limit - urgent, urgent)

    def judge(self, error: Exception, deadline: float) -> Verdict:
        # If no connection can be made, another server is needed, or another setting.
        if isinstance(error, ErrorReply):
            return Verdict(repeats=error.is_transient, broken=False)
        silent = isinstance(error, errors.TimeoutError) and not isinstance(error, NotConfirmed)
        silent = silent or isinstance(error, NotDelivered)
        return Verdict(repeats=isinstance(error, ConnectionBroken), silent=silent)

    def take_idle(self) -> tuple[Slot, Connection] | None:
        """A slot and an idle connection, if both are there now; else ``None``."""
        slot = self._slots.take_now(URGENT)
        if slot is None:
            return None
        connection = self.idle.take(clock.now())
        if connection is None:
            slot.release()
            return None
        return slot, connection

    def _too_slow(self) -> NoReturn:
        raise errors.TimeoutError("no connection within the time allowed")


def _connect(route: Route, spin: Spin) -> Connection:
    """A connection to the first of the servers that can be reached.

    Raises:
        ConnectionBroken: It broke before it could be used.
        redis.exceptions.RedisError, OSError: It cannot be made.
    """
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
