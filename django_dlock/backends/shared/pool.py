"""The connections of this process to one store, shared by its threads; the same rules everywhere.

* **A call without an answer makes every older connection suspect.** What dropped one connection in
  silence, such as a NAT or an address that has moved, has dropped the others too. So those that
  have not been heard of since the call began are closed, and the next call makes a new one.
* **A connection that nobody has used for a minute is not used again**, but closed.
* **A connection whose call broke it, or was interrupted, is closed**, and so is one that was in use
  when the pool was closed: an answer may still come, which is not for the next call.
* **Waiting for a free connection is waiting**, not an outage. It ends in ``NoSlot``, which says
  whether the store has answered other calls meanwhile.

Nothing here takes a thread lock, which a fork, a signal handler or a finalizer could find locked.
"""

from __future__ import annotations

import collections
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from ... import clock
from ...exceptions import BackendUnavailable, ConnectionsBusy
from ..connector import Connector
from ..slots import Slot, Slots

T = TypeVar("T")

MOST_IDLE = 60.0
"""Seconds without a call after which a connection is closed. Networks forget later than that."""
QUEUEING = 0.5
"""The part of a call's time for which it may wait for a connection."""
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two attempts of a call; the first repetition follows at once."""


class Pooled(Protocol):
    """A connection.

    Attributes:
        heard_at: When its last call was answered, on ``clock.now()``; written by the pool.
    """

    heard_at: float

    @property
    def is_reusable(self) -> bool:
        """Whether the next call may use it, after one that was answered."""

    def close(self) -> object: ...


C = TypeVar("C", bound=Pooled)


class NoSlot(TimeoutError):
    """No connection became free in time, so nothing was sent.

    Args:
        is_busy: Whether the store has answered other calls of this process meanwhile.
    """

    def __init__(self, is_busy: bool) -> None:
        super().__init__(
            "no connection was free within the time allowed"
            + ("" if is_busy else ", and no call that has one was answered")
        )
        self.is_busy = is_busy

    def unavailable(self, name: str, alias: str) -> BackendUnavailable:
        """What the caller of the backend is told."""
        kind = ConnectionsBusy if self.is_busy else BackendUnavailable
        error = kind(f"Nothing was sent: {self}", name, alias)
        error.unsent, error.__cause__ = True, self
        return error


class IdleConnections(Generic[C]):
    """Connections that no call uses, in the order in which they were last heard of."""

    def __init__(self) -> None:
        # Last in, first out, so that those that are not needed grow old, and are closed.
        self._connections: collections.deque[C] = collections.deque()

    def __len__(self) -> int:
        return len(self._connections)

    def take(self, now: float) -> C | None:
        """The one that was used last, unless it is too old; ``None`` if there is none."""
        try:
            connection = self._connections.pop()
        except IndexError:
            return None
        if now - connection.heard_at <= MOST_IDLE:
            return connection
        connection.close()
        self.close_unheard(now - MOST_IDLE)
        return None

    def keep(self, connection: C, now: float) -> None:
        """Keep it after a call that was answered."""
        connection.heard_at = now
        self._connections.append(connection)
        try:
            if self._connections[0].heard_at < now - MOST_IDLE:
                self.close_unheard(now - MOST_IDLE)
        except IndexError:
            # Another thread has taken it.
            pass

    def close_unheard(self, since: float) -> None:
        """Close those that have not been heard of since then; never waits for the store."""
        while True:
            try:
                oldest = self._connections.popleft()
            except IndexError:
                return
            if oldest.heard_at >= since:
                self._connections.appendleft(oldest)
                return
            oldest.close()

    def drop_all(self) -> list[C]:
        """Forget all of them, without closing any."""
        dropped, self._connections = list(self._connections), collections.deque()
        return dropped

    def close_all(self) -> None:
        self.close_unheard(float("inf"))


class Verdict(NamedTuple):
    """What an error of a call means for the pool.

    Attributes:
        repeats: Whether the call may succeed if it is repeated.
        broken: Whether the connection cannot be used any more; the call needs a new one.
        silent: Whether there was no answer by the deadline, or as far as the system can tell.
        telling: Whether it says more than a timeout of a later attempt.
    """

    repeats: bool = False
    broken: bool = True
    silent: bool = False
    telling: bool = False


class Connections(ABC, Generic[C]):
    """Connections that are opened by a deadline, kept, suspected and closed; any number of them.

    Args:
        make: Makes a connection; may take any time.

    Attributes:
        heard_at: When the store last answered a call.
        suspected: Is told of a call that was not answered, and when it began; for connections
            that are not in the pool.
    """

    def __init__(self, make: Callable[[], C]) -> None:
        self._connector = Connector(make)
        self.idle: IdleConnections[C] = IdleConnections()
        self.suspected: Callable[[float], object] = lambda since: None
        self.forget()

    def forget(self) -> None:
        """Begin with no connection; in a forked child, they are the parent's."""
        self.idle.drop_all()
        self.heard_at = float("-inf")
        self._connector.forget()

    def close(self) -> None:
        """Close idle connections, and discard attempts that took too long for their callers."""
        self._connector.forget()
        self.idle.close_all()

    def close_unused(self) -> None:
        """Close the connections that no call has used for a minute."""
        self.idle.close_unheard(clock.now() - MOST_IDLE)

    def keep(self, connection: C) -> None:
        """Keep a connection whose call was answered for the next caller, or close it."""
        if not connection.is_reusable:
            connection.close()
            return
        self.heard_at = now = clock.now()
        self.idle.keep(connection, now)

    def suspect(self, since: float) -> None:
        """Close idle connections, because a call that began then was not answered."""
        self.idle.close_unheard(since)
        self.suspected(since)

    def connect(self, deadline: float) -> C:
        """A new connection, which the caller must ``keep`` or close."""
        connection = self._connector.connect(deadline)
        if connection is None:
            self._too_slow()
        return connection

    @abstractmethod
    def _too_slow(self) -> NoReturn:
        """Raise the error of this store: no connection was made by the deadline."""


class ConnectionPool(Connections[C]):
    """A limited number of connections, for calls that are repeated if that can help.

    Args:
        counts: How many connections there may be for each kind of calls; see ``Slots``.
    """

    failures: tuple[type[Exception], ...]
    """The errors that ``judge`` knows."""

    def __init__(self, make: Callable[[], C], *counts: int) -> None:
        self._counts, self._generation = counts, 0
        super().__init__(make)

    def forget(self) -> None:
        super().forget()
        self._slots = Slots(*self._counts)

    def close(self) -> None:
        """Close idle connections now, and the others when their calls end."""
        self._generation += 1
        super().close()

    def call(self, use: Callable[[C], T], deadline: float, urgency: int) -> T:
        """Call ``use`` with a connection; repeat it until the deadline if that can help.

        Args:
            use: May be called several times, so what it sends must be idempotent.
            urgency: See ``Slots``.

        Raises:
            NoSlot: No connection was free in time.
            Exception: One of ``failures``.
        """
        now = clock.now()
        slot = self._slots.take_now(urgency) or self._wait(urgency, deadline, now)
        try:
            connection, pause, told = self.idle.take(now), 0.0, None
            while True:
                try:
                    return self._use(connection or self.connect(deadline), use, deadline)
                except self.failures as error:
                    verdict = self.judge(error, deadline)
                    if verdict.silent:
                        self.suspect(now)
                    if verdict.telling:
                        told = error
                    if not verdict.repeats or clock.now() + pause >= deadline:
                        if told is not None:
                            raise told from told.__cause__
                        raise
                    # Make a new one if this one broke: other idle ones are as old.
                    connection = None if verdict.broken else self.idle.take(clock.now())
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
        finally:
            slot.release()
            # Its traceback refers to this frame: a cycle.
            told = None

    def _use(self, connection: C, use: Callable[[C], T], deadline: float) -> T:
        """Call ``use``, then ``keep`` the connection or close it, even after an interrupt."""
        intact, generation = False, self._generation
        try:
            answer = use(connection)
            intact = True
            return answer
        except self.failures as error:
            intact = not self.judge(error, deadline).broken
            raise
        finally:
            if intact and generation == self._generation:
                self.keep(connection)
            else:
                connection.close()

    @abstractmethod
    def judge(self, error: Any, deadline: float) -> Verdict:
        """What one of ``failures`` means."""

    def take(self, urgency: int, deadline: float) -> Slot:
        """Wait for the right to use a connection.

        Raises:
            NoSlot: None was free in the first half of the time.
        """
        return self._slots.take_now(urgency) or self._wait(urgency, deadline, clock.now())

    def _wait(self, urgency: int, deadline: float, began_at: float) -> Slot:
        # A call that began with too little time left would look like one without an answer.
        slot = self._slots.take(urgency, began_at + QUEUEING * (deadline - began_at))
        if slot is None:
            raise NoSlot(self.heard_at >= began_at)
        return slot
