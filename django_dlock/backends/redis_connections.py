"""Connections of our own to one Redis, each call bounded by one deadline.

redis-py's pool is not used: it hands a broken connection to the next caller and knows no deadline.
Its connections are, so that whatever it can reach can be reached from here.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from redis import exceptions as errors

from .. import clock
from .redis_reply import take
from .redis_spin import Spin

__all__ = ["CUT", "FAILURES", "Place", "RedisConnections"]

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


class Place:
    """The right to one connection; between calls, the connection that was used last.

    Whoever uses the connection takes it out first: a place that comes back without one, or that
    an interrupt lets go of, costs a new connection and never a late reply.
    """

    __slots__ = ("__weakref__", "_age", "_pool", "connection")

    def __init__(self, pool: RedisConnections, age: int) -> None:
        self._pool, self._age = weakref.ref(pool), age
        self.connection: Any = None

    def __del__(self) -> None:
        pool = self._pool()
        if pool is not None:
            pool._replace(self._age)

    def is_of(self, age: int) -> bool:
        """Whether it is of this life of its pool; a forked child begins a new one."""
        return self._age == age


class _Turn:
    """One caller's wait for a place."""

    __slots__ = ("_bell", "_outcome")

    def __init__(self) -> None:
        self._outcome: dict[str, Place | None] = {}
        # A bare lock, for the same reason as above.
        self._bell = threading.Lock()
        self._bell.acquire()

    def offer(self, place: Place) -> bool:
        """Whether it is taken; of an offer and ``end``, the first counts."""
        if self._outcome.setdefault("", place) is not place:
            return False
        self._bell.release()
        return True

    def wait(self, timeout: float) -> None:
        self._bell.acquire(timeout=timeout)

    def end(self) -> Place | None:
        """Wait no more; the place that was offered by now."""
        return self._outcome.setdefault("", None)


class RedisConnections:
    """A bounded pool that knows deadlines; callers beyond its bound queue for a place.

    Args:
        make: Builds a connection without connecting it; its socket timeouts are ``timeout``.
        timeout: Seconds that one reply may take.
        limit: Connections in use and idle at the most.
        spin: Seconds for which a reply is looked for before its reader sleeps.
    """

    def __init__(
        self, make: Callable[[], Any], timeout: float, limit: int, spin: float = 0.0
    ) -> None:
        self._make, self._timeout, self._limit = make, timeout, limit
        self.spin = Spin(spin)
        self._age = 0
        self.forget()

    def forget(self) -> None:
        """Drop all connections without a word to the server, whose sessions are the parent's."""
        # Their finalizers close this process's descriptors only.
        self._age += 1
        # Last in, first out: connections beyond the need grow old and are closed by the server.
        # A deque's append and pop are atomic, so that no lock can be left held by a fork, a
        # signal handler or a finalizer.
        self._free = collections.deque(Place(self, self._age) for _ in range(self._limit))
        self._late: collections.deque[_Attempt] = collections.deque()
        # What lets go of a lease, or prolongs one, never queues behind what wants one.
        self._urgent: collections.deque[_Turn] = collections.deque()
        self._ordinary: collections.deque[_Turn] = collections.deque()

    def close(self) -> None:
        """Close idle connections, and those that came too late for their caller."""
        self._late.clear()
        while (place := self.idle()) is not None:
            self.drop(place)

    # -- places ------------------------------------------------------------------------

    def idle(self) -> Place | None:
        """A place with an idle connection, ``None`` where there is none."""
        try:
            place = self._free.pop()
        except IndexError:
            return None
        if place.connection is None:
            self.give_back(place)
            return None
        return place

    def take(self, deadline: float, *, urgent: bool) -> Place:
        """A place, as soon as one is free.

        Raises:
            redis.exceptions.TimeoutError: None was free by then.
        """
        if urgent or not self._ordinary:
            try:
                return self._free.pop()
            except IndexError:
                pass
        queue = self._urgent if urgent else self._ordinary
        turn = _Turn()
        try:
            queue.append(turn)
            # One may have come back before this caller stood in the queue.
            self._serve()
            turn.wait(max(0.0, deadline - clock.now()))
        except BaseException:
            place = turn.end()
            _remove(queue, turn)
            if place is not None:
                self.give_back(place)
            raise
        place = turn.end()
        if place is None:
            _remove(queue, turn)
            raise errors.TimeoutError("no connection was free within the time allowed")
        return place

    def give_back(self, place: Place) -> None:
        """To the caller that has queued longest, or to the others that are free."""
        if not place.is_of(self._age):
            return
        if (self._urgent or self._ordinary) and self._hand(place):
            return
        if place.connection is None:
            self._free.appendleft(place)
        else:
            self._free.append(place)
        if self._urgent or self._ordinary:
            # One that came after the look above.
            self._serve()

    def drop(self, place: Place) -> None:
        """Give it back without its connection, which may owe a reply."""
        connection, place.connection = place.connection, None
        self.give_back(place)
        if connection is not None:
            connection.disconnect()

    def _serve(self) -> None:
        while self._free and (self._urgent or self._ordinary):
            try:
                place = self._free.pop()
            except IndexError:
                return
            if not self._hand(place):
                self._free.append(place)

    def _hand(self, place: Place) -> bool:
        for queue in (self._urgent, self._ordinary):
            while queue:
                try:
                    turn = queue[0]
                except IndexError:
                    break
                # Only then out of the queue: one that is interrupted between the two is no
                # longer waited for, or is removed by the next.
                taken = turn.offer(place)
                _remove(queue, turn)
                if taken:
                    return True
        return False

    def _replace(self, age: int) -> None:
        """A place was let go of by an interrupt."""
        if age == self._age:
            self._free.appendleft(Place(self, age))
            self._serve()

    # -- calls -------------------------------------------------------------------------

    def call(self, talk: Callable[[Any], T], *, deadline: float, urgent: bool = False) -> T:
        """Let ``talk`` use a connection, and again on new ones while they prove broken.

        An idle one may have been closed long ago, and a reply may be lost on a new one, too; a
        third break in a row is no accident.

        Args:
            talk: Sends and reads; may be called again, so what it says must be idempotent.
            urgent: It goes before those that are not.

        Raises:
            redis.exceptions.RedisError, OSError: No answer, or the server's refusal.
        """
        place = self.take(deadline, urgent=urgent)
        try:
            connection, place.connection = place.connection, None
            breaks = 0
            while True:
                if connection is None:
                    connection = self.connect(deadline)
                try:
                    answer = talk(connection)
                except CUT:
                    connection.disconnect()
                    connection, breaks = None, breaks + 1
                    if breaks == 3 or clock.now() >= deadline:
                        raise
                except BaseException:
                    # An interrupt, too: a late reply must never answer the next command.
                    connection.disconnect()
                    raise
                else:
                    place.connection = connection
                    return answer
        finally:
            self.give_back(place)

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

    def read(
        self, connection: Any, deadline: float, *, after: bytes = b"", look: bool = True
    ) -> Any:
        """The reply to the command sent last, on a connection that owes no other.

        Args:
            after: The reply to a command before it, which is not waited for by itself. A refusal
                of that command is no matter.
            look: Look for it for a moment before sleeping, where that pays.

        Raises:
            redis.exceptions.ResponseError: The server's refusal; the connection is in order.
            redis.exceptions.RedisError, OSError: No reply by ``deadline``.
        """
        if look:
            self.spin.look(connection)
        # Else the socket's own timeout would be too late.
        if deadline - clock.now() >= self._timeout:
            reply = take(connection, after)
            if reply is not None:
                return reply
        if after:
            try:
                self.read_any(connection, deadline)
            except errors.ResponseError:
                pass
        return self.read_any(connection, deadline)

    def read_any(self, connection: Any, deadline: float) -> Any:
        """As ``read``, by redis-py, which may have read the reply ahead."""
        left = deadline - clock.now()
        # The socket's own timeout does otherwise, and costs no further system call.
        if left < self._timeout and not connection.can_read(timeout=max(0.0, left)):
            raise errors.TimeoutError("no reply within the time allowed")
        return connection.read_response()


def _remove(queue: collections.deque[_Turn], turn: _Turn) -> None:
    try:
        queue.remove(turn)
    except ValueError:
        pass  # By whoever offered it a place.
