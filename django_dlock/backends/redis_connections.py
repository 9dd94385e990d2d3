"""Connections of our own to one Redis, each call bounded by one deadline.

redis-py's client is not used: it retries silently, and its pool hands a broken connection to
the next caller. Its connections are, so that whatever it can reach can be reached from here.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from redis import exceptions as errors

from .. import clock

__all__ = ["CUT", "FAILURES", "RedisConnections"]

T = TypeVar("T")

FAILURES = (errors.RedisError, OSError)
"""What a server, the network or the client may answer instead of a reply."""
CUT = (errors.ConnectionError, ConnectionError, EOFError)
"""A connection that is broken; the server may be well."""


class _Attempt:
    """One new connection, made on a thread of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        # A bare lock that is held until the end, and no Event: a signal handler that raises can
        # leave that one locked for ever, and whoever waits for it.
        self._running = threading.Lock()
        self._running.acquire()
        self._ended = False
        self.connection: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        thread = threading.Thread(target=self.run, name="dlock-connect", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No new threads while the interpreter ends; a last release may still go out.
            self.run()

    def run(self) -> None:
        try:
            connection = self._make()
            connection.connect()
            self.connection = connection
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            self.error = error
        finally:
            self._ended = True
            self._running.release()

    def wait(self, timeout: float) -> bool:
        """Block until it has ended or ``timeout`` seconds have passed; whether it has ended."""
        if not self._ended and self._running.acquire(timeout=timeout):
            self._running.release()
        return self._ended


class RedisConnections:
    """A pool that grows with its callers and knows deadlines.

    Args:
        make: Builds a connection without connecting it; its socket timeouts are ``timeout``.
        timeout: Seconds that one reply may take.
    """

    def __init__(self, make: Callable[[], Any], timeout: float) -> None:
        self._make, self._timeout = make, timeout
        # Last in, first out: connections beyond the need grow old and are closed by the server.
        # A deque's append and pop are atomic, so that no lock can be left held by a fork, a
        # signal handler or a finalizer.
        self._idle: collections.deque[Any] = collections.deque()
        self._late: collections.deque[_Attempt] = collections.deque()

    def forget(self) -> None:
        """Drop all connections without a word to the server, whose sessions are the parent's."""
        # Their finalizers close this process's descriptors only.
        self._idle, self._late = collections.deque(), collections.deque()

    def close(self) -> None:
        """Close idle connections, and those that came too late for their caller."""
        self._late.clear()
        while (connection := self.idle()) is not None:
            connection.disconnect()

    def idle(self) -> Any | None:
        """Take an idle connection, ``None`` where there is none."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, connection: Any) -> None:
        """Keep a connection whose last reply was read in full."""
        self._idle.append(connection)

    def call(
        self, talk: Callable[[Any], T], *, deadline: float, again_within: float = math.inf
    ) -> T:
        """Let ``talk`` use a connection, and again on new ones while they prove broken.

        An idle one may have been closed long ago, and a reply may be lost on a new one, too; a
        third break in a row is no accident.

        Args:
            talk: Sends and reads; may be called again, so what it says must be idempotent.
            again_within: Seconds of talk after which a break is not tried again.

        Raises:
            redis.exceptions.RedisError, OSError: No answer, or the server's refusal.
        """
        connection, breaks = self.idle(), 0
        while True:
            if connection is None:
                connection = self.connect(deadline)
            started = clock.now()
            try:
                return self._talk(talk, connection)
            except CUT:
                now, breaks = clock.now(), breaks + 1
                if breaks == 3 or now - started > again_within or now >= deadline:
                    raise
            connection = None

    def _talk(self, talk: Callable[[Any], T], connection: Any) -> T:
        try:
            answer = talk(connection)
        except BaseException:
            # An interrupt, too: a late reply must never answer the next command.
            connection.disconnect()
            raise
        self.give_back(connection)
        return answer

    def connect(self, deadline: float) -> Any:
        """A new connection, not one of the pool's."""
        while True:
            # An attempt that a former caller could not wait for serves the next one: while a
            # name server hangs, threads do not pile up.
            try:
                attempt, mine = self._late.pop(), False
            except IndexError:
                attempt, mine = _Attempt(self._make), True
                attempt.start()
            done = False
            try:
                done = attempt.wait(max(0.0, deadline - clock.now()))
            finally:
                if not done:
                    self._late.append(attempt)
            if not done:
                raise errors.TimeoutError("no connection within the time allowed")
            if attempt.error is None:
                return attempt.connection
            if mine:
                raise attempt.error

    def read(self, connection: Any, deadline: float) -> Any:
        """The reply to the command sent last.

        Raises:
            redis.exceptions.ResponseError: The server's refusal; the connection is in order.
            redis.exceptions.RedisError, OSError: No reply by ``deadline``.
        """
        left = deadline - clock.now()
        # The socket's own timeout does otherwise, and costs no further system call.
        if left < self._timeout and not connection.can_read(timeout=max(0.0, left)):
            raise errors.TimeoutError("no reply within the time allowed")
        return connection.read_response()
