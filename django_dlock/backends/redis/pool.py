"""Connections to one Redis, shared by the threads of this process; every call has a deadline.

redis-py's pool is not used: it gives a broken connection to the next caller, and has no deadlines.
This module uses no thread lock, which a fork, a signal handler or a finalizer could find locked.
"""

from __future__ import annotations

import collections
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from redis import exceptions as errors

from ... import clock
from .connection import Connection, ConnectionBroken, ErrorReply, is_broken_handshake
from .polling import Spin

__all__ = ["Pool", "PoolSlot"]

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two attempts; the second attempt follows at once."""

SlotQueue: TypeAlias = "queue.SimpleQueue[PoolSlot]"


class PoolSlot:
    """The right to use one connection; it returns to the pool even if an interrupt drops it."""

    __slots__ = ("_slots",)

    def __init__(self, slots: weakref.ref[SlotQueue]) -> None:
        # Weak, so that slots do not return to a queue that a forked child has discarded.
        self._slots = slots

    def release(self) -> None:
        slots = self._slots()
        if slots is not None:
            slots.put(self)

    def __del__(self) -> None:
        slots = self._slots()
        if slots is not None:
            slots.put(PoolSlot(self._slots))


class _Attempt(threading.Thread):
    """Makes one connection, on a thread, because a name server may take longer than a caller."""

    def __init__(self, make: Callable[[], Any], spin: Spin) -> None:
        super().__init__(name="dlock-connect", daemon=True)
        self._make, self._spin = make, spin
        self.outcome: Connection | BaseException | None = None

    def begin(self) -> None:
        try:
            self.start()
        except RuntimeError:
            # No thread can start while the interpreter ends; connect here for a last release.
            self.run()

    def run(self) -> None:
        try:
            client = self._make()
            client.connect()
            self.outcome = Connection(client, self._spin)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            # The traceback refers to this frame, and so to this thread: a cycle.
            self.outcome = error.with_traceback(None)


class Pool:
    """At most ``limit`` connections; further callers queue.

    A quarter of them is reserved for urgent calls, which renew or end leases, so that those never
    queue behind calls that acquire one.

    Args:
        make: Builds a connection of redis-py without connecting it.
    """

    def __init__(self, make: Callable[[], Any], limit: int) -> None:
        self._make, self._limit, self._spin = make, limit, Spin()
        self.after_fork()

    def after_fork(self) -> None:
        """Discard all connections, which belong to the parent; runs in a forked child."""
        # Last in, first out, so that the server closes connections that are not needed. In a
        # child, finalizers close only its own descriptors, without a message to the server.
        self._idle: collections.deque[Connection] = collections.deque()
        self._late: collections.deque[_Attempt] = collections.deque()
        urgent = max(1, self._limit // 4)
        self._urgent, self._ordinary = _filled(urgent), _filled(self._limit - urgent)

    def close(self) -> None:
        """Close idle connections, and discard attempts that took too long for their callers."""
        self._late.clear()
        while self._idle:
            self._idle.pop().close()

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
                    if not error.is_passing or clock.now() + pause >= deadline:
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

    def take(self, deadline: float, *, urgent: bool) -> PoolSlot:
        """Wait for a free slot.

        Raises:
            redis.exceptions.TimeoutError: None was free by the deadline.
        """
        slot = self._free_slot(urgent=urgent)
        if slot is not None:
            return slot
        slots = self._urgent if urgent else self._ordinary
        try:
            return slots.get(timeout=max(0.0, deadline - clock.now()))
        except queue.Empty:
            raise errors.TimeoutError("no connection was free within the time allowed") from None

    def take_idle(self) -> tuple[PoolSlot, Connection] | None:
        """A slot and an idle connection, if both are there now; else ``None``."""
        slot = self._free_slot(urgent=True)
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

    def _free_slot(self, *, urgent: bool) -> PoolSlot | None:
        try:
            return self._urgent.get_nowait() if urgent else self._ordinary.get_nowait()
        except queue.Empty:
            # An urgent call may take any slot.
            return self._free_slot(urgent=False) if urgent else None

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
        while True:
            # First use an attempt that an earlier caller stopped waiting for, so that threads do
            # not pile up while a name server hangs.
            try:
                attempt, mine = self._late.pop(), False
            except IndexError:
                attempt, mine = _Attempt(self._make, self._spin), True
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
                if isinstance(outcome, Connection):
                    return outcome
                if outcome is None:
                    raise errors.TimeoutError("no connection within the time allowed")
                if is_broken_handshake(outcome):
                    raise ConnectionBroken(str(outcome)) from outcome
                if mine:
                    raise outcome
            finally:
                # The error's traceback refers to this frame: a cycle.
                del outcome


def _filled(count: int) -> SlotQueue:
    slots: SlotQueue = queue.SimpleQueue()
    for _ in range(count):
        slots.put(PoolSlot(weakref.ref(slots)))
    return slots
