"""A limited number of connections, shared by the threads of this process; calls have deadlines.

Of ``limit`` connections, one is reserved for renewals and one for calls that end a lease, so that
neither waits behind acquires. Nothing here takes a lock that a fork, a signal handler or a
finalizer could find held.
"""

from __future__ import annotations

import collections
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

from ... import clock
from .connection import Connection, Failure, connect_failure
from .deadlines import deadlines

__all__ = ["FEWEST", "Pool", "Urgency"]

T = TypeVar("T")

Urgency = Literal["renew", "end", "ordinary"]
"""What a call does: renew leases, end a lease, or anything else."""
FEWEST = 3
"""The least number of connections that a pool needs."""
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two attempts; the first repetition follows at once."""

SlotQueue: TypeAlias = "queue.SimpleQueue[_Slot]"


class _Slot:
    """The right to use one connection; returned even if an interrupt drops the object."""

    __slots__ = ("_slots",)

    def __init__(self, slots: weakref.ref[SlotQueue]) -> None:
        # A weak reference: a queue that a forked child has abandoned must get nothing back.
        self._slots = slots

    def release(self) -> None:
        slots = self._slots()
        if slots is not None:
            slots.put(self)

    def __del__(self) -> None:
        slots = self._slots()
        if slots is not None:
            slots.put(_Slot(self._slots))


class _Attempt(threading.Thread):
    """Makes one connection, on a thread because no driver takes a deadline for all of it."""

    def __init__(self, make: Callable[[], Connection]) -> None:
        super().__init__(name="dlock-connect", daemon=True)
        self._make = make
        self.outcome: Connection | BaseException | None = None

    def begin(self) -> None:
        try:
            self.start()
        except RuntimeError:
            # No thread can start while the interpreter shuts down; a last release is still sent.
            self.run()

    def run(self) -> None:
        try:
            self.outcome = self._make()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            # Its traceback refers to this frame and so to this thread: a reference cycle.
            self.outcome = error.with_traceback(None)


class Pool:
    """At most ``limit`` connections; further callers wait their turn."""

    def __init__(self, make: Callable[[], Connection], limit: int) -> None:
        self._make, self._limit, self._generation = make, limit, 0
        self._idle: collections.deque[Connection] = collections.deque()
        self.forget()

    def forget(self) -> None:
        """Leave all connections to the parent; called in a forked child."""
        for connection in self._idle:
            connection.leave_to_parent()
        self._idle = collections.deque()
        self._late: collections.deque[_Attempt] = collections.deque()
        self._slots: dict[Urgency, SlotQueue] = {
            "renew": _filled(1),
            "end": _filled(1),
            "ordinary": _filled(self._limit - 2),
        }

    def close(self) -> None:
        """Close idle connections now, and the others when their calls end."""
        self._generation += 1
        self._late.clear()
        while self._idle:
            self._idle.pop().close()

    def call(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T:
        """Call ``use`` with a connection; repeat until the deadline while a repetition can help.

        Args:
            use: May be called again, so it must be idempotent.

        Raises:
            Failure: No answer, or a refusal.
        """
        slot = self._take(deadline, urgency)
        try:
            connection, pause, refused = self._idle_connection(), 0.0, None
            while True:
                try:
                    return self._use(connection or self.connect(deadline), use, deadline)
                except Failure as error:
                    refused = error if error.kind == "read-only" else refused
                    may_help = error.kind in ("broken", "overtaken", "passing", "read-only")
                    if not may_help or clock.now() + pause >= deadline:
                        if refused is not None:
                            # The earlier error says more than that the time is over.
                            raise refused from refused.__cause__
                        raise
                    # Not another idle connection after this one broke: they are as old.
                    of_use = error.kind in ("overtaken", "passing")
                    connection = self._idle_connection() if of_use else None
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
        finally:
            slot.release()

    def _use(self, connection: Connection, use: Callable[[Connection], T], deadline: float) -> T:
        intact, generation = False, self._generation
        try:
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

    def _take(self, deadline: float, urgency: Urgency) -> _Slot:
        # A more urgent call may take more kinds of slots.
        order: tuple[Urgency, ...] = ("ordinary", "end", "renew")
        for each in order[: order.index(urgency) + 1]:
            slot = _free_slot(self._slots[each])
            if slot is not None:
                return slot
        try:
            return self._slots[urgency].get(timeout=max(0.0, deadline - clock.now()))
        except queue.Empty:
            error = TimeoutError("no connection was free within the time allowed")
            raise Failure("broken", error) from None

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
        while True:
            # Reuse the attempt of an earlier caller that stopped waiting, so that threads do not
            # pile up while a name server hangs.
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
                # Read it once: the attempt may end between two lines.
                outcome = attempt.outcome
                if outcome is None:
                    self._late.append(attempt)
            try:
                if isinstance(outcome, Connection):
                    return outcome
                if outcome is None:
                    late = TimeoutError("no connection within the time allowed")
                    raise Failure("broken", late)
                if isinstance(outcome, Failure):
                    raise outcome
                if mine:
                    raise connect_failure(outcome) from outcome
            finally:
                # Its traceback refers to this frame: a reference cycle.
                del outcome


def _free_slot(slots: SlotQueue) -> _Slot | None:
    try:
        return slots.get_nowait()
    except queue.Empty:
        return None


def _filled(count: int) -> SlotQueue:
    slots: SlotQueue = queue.SimpleQueue()
    for _ in range(count):
        slots.put(_Slot(weakref.ref(slots)))
    return slots
