"""Notifies the waiters of this process when a lease is handed over to them.

``scripts.py`` describes what the server does. In this process, for threads and coroutines:

* A process has one channel, and one connection subscribed to it, for all its waiters.
* A waiter is sure to get its message only if it sent its request after the subscription began;
  otherwise the server may have skipped it. So the first wait subscribes and lets its caller ask
  again, as does every wait after the connection broke. A message that arrives between a request
  and its wait is kept.
* A message is valid if its MAC is right; if not, its waiter asks again, as for a message that a
  second one overtook. It was read after the request was sent, and its token is higher than that of
  the lease that the request found. An older message belongs to an earlier grant, which is over, or
  which a server that took over does not know.
* As with every lease, the deadline counts from when the request was *sent*; the server's clock
  decides nothing here. ``Commands.handed_over`` accepts the lease if at least two thirds of it are
  left and it will be renewed in the background; otherwise the caller asks again, finds its own
  grant and prolongs it to the full TTL.
* A waiter that gets no message asks again when the lease that it found would end, and not earlier.
* A connection without messages for a while must answer a PING.
* If the process cannot subscribe, or the server does not count it as a subscriber, waiters ask
  again every few tenths of a second.

Among threads, the first waiter reads the socket itself, so that only the operating system has to
wake it. It passes messages on to other waiters, and another one reads when it stops. If an
exception interrupts the reading, the connection is closed, because half a message may be lost.
For coroutines, one thread reads in the same way as long as any of them waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from redis import exceptions as errors

from ... import clock
from ...lease import Contention
from ...process.points import reached
from ..shared.waiting import ThreadEvent, Waiter, Waiters, poll_at
from .commands import HandoverMessage, Ticket, read_message
from .connection import Connection, ConnectionBroken, ErrorReply
from .keys import Keys
from .pool import Pool

REFUSED = frozenset({"ERR", "NOPERM"})
"""Errors of a server that does not know a command, or whose user may not use it."""
SHORTEST_WAIT = 0.05
"""The shortest time between two requests of one waiter, in seconds."""
REFUSED_FOR = 60.0
"""Seconds after which subscribing is tried again if the user was not allowed to."""
SILENCE = 10.0
"""Seconds without a message after which the connection must answer a PING."""
KEPT_FOR = 60.0
"""Seconds for which a message is kept if its waiter is not waiting right now. In a busy process it
may take long from the answer to a request to the wait."""
PRUNE_EVERY = 5.0
"""Seconds between two searches for messages that were kept for too long."""
MOST_KEPT = 1000
"""Messages that may be kept; of more, those of owners that do not wait are dropped."""
ELSEWHERE = 2.0
"""Seconds after a subscription during which a new subscription would not help either."""
SOON = 0.1
"""A connection that breaks within this many seconds may break again at once."""

_NEVER = Contention("", "held", float("inf"), 0.0, ticket=Ticket(0, float("inf")))
"""For the reading thread, which itself never gets a message."""


class _Waiter(Waiter):
    """One caller of ``wait`` or ``async_wait``."""

    __slots__ = ("error", "is_coroutine", "message")

    def __init__(self, owner: str, *, is_coroutine: bool = False) -> None:
        super().__init__(owner)
        self.is_coroutine = is_coroutine
        self.error: BaseException | None = None
        self.message: HandoverMessage | None = None


class HandoverListener:
    """Receives messages for all waiters of this process on one server.

    It uses atomic dictionary operations instead of a thread lock, which a fork, a signal handler
    or a finalizer could leave locked.
    """

    def __init__(self, pool: Pool, keys: Keys, timeout: float) -> None:
        self._pool, self._keys, self._timeout = pool, keys, timeout
        self._waiters: Waiters[_Waiter] = Waiters(self._left)
        self.after_fork()
        pool.suspected = self._suspect

    def after_fork(self) -> None:
        """Discard everything without a message to the server: the session is the parent's."""
        self._connection: Connection | None = None
        self._waiters.forget()
        self._messages: dict[str, HandoverMessage] = {}
        self._reading: dict[str, _Waiter] = {}
        self._subscribed_at = self._heard_at = self._pinged_at = 0.0
        self._complete_since = self._pruned_at = 0.0
        self._refused_at = float("-inf")
        self._breaks = 0

    def close(self) -> None:
        """Close the connection, unless a waiter is reading it."""
        nobody = _Waiter("")
        try:
            if self._reading.setdefault("", nobody) is nobody:
                self._drop(self._connection)
        finally:
            self._left(nobody)

    def _suspect(self, since: float) -> None:
        """Have the subscription answer a PING soon: a call that began then was not answered."""
        if self._heard_at < since:
            self._heard_at = float("-inf")

    @property
    def refused(self) -> bool:
        """Whether the last attempt has shown that the user may not subscribe."""
        return clock.now() < self._refused_at + REFUSED_FOR

    def refusal(self, connection: Connection, deadline: float) -> str:
        """The server's error if it refuses to publish or to subscribe; empty if it does both.

        The connection is subscribed afterwards.
        """
        try:
            # An empty message, which every listener ignores.
            connection.execute("PUBLISH", self._keys.channel, "", deadline=deadline)
            connection.execute("SUBSCRIBE", self._keys.channel, deadline=deadline)
        except ErrorReply as error:
            if error.code in REFUSED:
                return str(error)
            raise
        return ""

    # -- waiting -----------------------------------------------------------------------

    def wait(
        self, owner: str, met: Contention, *, until: float, interrupted: Callable[[], bool]
    ) -> HandoverMessage | None:
        """Wait for a message; ``None`` means that the owner should ask the server again.

        Raises:
            redis.exceptions.RedisError, OSError: Subscribing or reading failed.
        """
        waiter = _Waiter(owner)
        is_over, until = (
            partial(self._heard, waiter, met, self.refused),
            self._asks_again_at(met, until),
        )
        self._waiters.wait(
            waiter, until, interrupted, is_over, partial(self._read_or_sleep, waiter)
        )
        return waiter.message

    async def async_wait(
        self,
        owner: str,
        met: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
        abandoned: Callable[[], object],
    ) -> HandoverMessage | None:
        """As ``wait``, for coroutines.

        Args:
            abandoned: See ``Waiters.async_wait``.
        """
        waiter = _Waiter(owner, is_coroutine=True)
        heard, until = (
            partial(self._heard, waiter, met, self.refused),
            self._asks_again_at(met, until),
        )

        def is_over() -> bool:
            if heard():
                return True
            if waiter.error is not None:
                raise waiter.error
            self._read_for_coroutines()
            return False

        def forget() -> None:
            self._messages.pop(owner, None)
            abandoned()

        await self._waiters.async_wait(waiter, until, interrupted, forget, is_over)
        return waiter.message

    def _read_or_sleep(self, waiter: _Waiter, event: ThreadEvent, until: float) -> None:
        """What a thread does until it is woken."""
        if self.refused or self._reading.setdefault("", waiter) is not waiter:
            reached("wait.asleep", waiter=waiter.owner)
            event.sleep(until)
        elif self._connection is None:
            self._subscribe(clock.now() + self._timeout)
        elif not self._listen(until, waiter.owner):
            waiter.asks_again = True

    def _asks_again_at(self, met: Contention, until: float) -> float:
        """When a waiter that gets no message asks again."""
        until = min(until, clock.now() + max(SHORTEST_WAIT, met.remaining + 0.002))
        return poll_at(until) if self.refused else until

    def _heard(self, waiter: _Waiter, met: Contention, refused: bool) -> bool:
        """Whether the wait is over; sets ``waiter.message`` if a message ended it.

        Args:
            refused: Whether ``self.refused`` was true when the wait began.
        """
        # Read this before the messages: a message that comes later wakes this waiter.
        listening = self._connection is not None
        ticket = cast(Ticket, met.ticket)
        message = self._messages.pop(waiter.owner, None)
        if message is not None and (
            not message.token
            or (message.token > ticket.token and message.read_at > ticket.asked_at)
        ):
            waiter.message = message
            return True
        asked_too_early = listening and ticket.asked_at <= self._complete_since
        if listening and not (asked_too_early or ticket.listens):
            self._subscribed_elsewhere()
            return True
        return asked_too_early or self.refused is not refused

    def _left(self, waiter: _Waiter) -> None:
        """Wake another waiter to read; may be called twice."""
        if self._reading.get("") is waiter:
            self._reading.pop("", None)
        # Even if this waiter was not the reader: the last reader may have just woken it to read.
        if not self._reading:
            for other in self._waiters:
                if not other.is_coroutine:
                    other.wake()
                    break

    def _read_for_coroutines(self) -> None:
        """Make sure that a thread is reading while coroutines wait."""
        if _READER in self._waiters.by_owner or self.refused:
            return
        # Entered before the thread starts, so that two coroutines do not start two.
        starting = _Waiter(_READER)
        if self._waiters.by_owner.setdefault(_READER, starting) is starting:
            run = partial(self._run, starting)
            try:
                threading.Thread(target=run, name="dlock-listener-redis", daemon=True).start()
            except BaseException:
                self._waiters.leave(starting)
                raise

    def _run(self, starting: _Waiter) -> None:
        try:
            while self._coroutines():
                self.wait(
                    _READER, _NEVER, until=float("inf"), interrupted=lambda: not self._coroutines()
                )
        except BaseException as error:  # noqa: BLE001 - its waiters raise it
            for waiter in self._coroutines():
                waiter.error = error
                waiter.wake()
        finally:
            # If all coroutines were gone, it has not waited at all; but a new one may have come.
            self._waiters.leave(starting)
            if self._coroutines():
                self._wake_all()

    def _coroutines(self) -> list[_Waiter]:
        return [waiter for waiter in self._waiters if waiter.is_coroutine]

    def leave(self) -> None:
        """Another server is the master now: let the waiters subscribe and ask there."""
        connection = self._connection
        if connection is not None:
            connection.wake()

    # -- reading -----------------------------------------------------------------------

    def _subscribe(self, deadline: float) -> None:
        connection = self._pool.connect(deadline)
        try:
            connection.execute("SUBSCRIBE", self._keys.channel, deadline=deadline)
        except BaseException as error:
            connection.close()
            if not (isinstance(error, ErrorReply) and error.code in REFUSED):
                raise
            self._refused_at = clock.now()
        else:
            # Only now: requests that were sent earlier do not count.
            self._subscribed_at = self._complete_since = self._heard_at = clock.now()
            self._pinged_at = 0.0
            self._connection = connection
            if connection.was_left:
                # The master changed meanwhile, perhaps before ``leave`` could see the connection.
                self._drop(connection)
                return
            reached("listener.listening", store="redis")
        self._wake_all()

    def _subscribed_elsewhere(self) -> None:
        """Reconnect: the server that answers requests has no such subscription.

        This happens after a fail-over.
        """
        connection = self._connection
        left = connection is not None and connection.was_left
        if not left and clock.now() - self._subscribed_at < ELSEWHERE:
            # The subscription is new, so requests and subscriptions reach different servers.
            self._refused_at = clock.now()
        self._drop(connection)

    def _listen(self, until: float, owner: str) -> bool:
        """Read for messages until the given time; returns ``False`` if the connection is lost."""
        connection = self._connection
        if connection is None:
            return False
        reached("wait.asleep", waiter=owner)
        try:
            if connection.was_left:
                raise ConnectionBroken("another server is the master now")
            self._ping_if_silent(connection)
            try:
                self._deliver(connection.read(until))
            except errors.TimeoutError:
                # Only after an empty read: in a stopped process, time passes while a reply waits.
                if self._pinged_at and clock.now() - self._pinged_at > self._timeout:
                    raise ConnectionBroken("no answer to a PING") from None
        except ConnectionBroken:
            self._drop(connection)
            soon = clock.now() - self._subscribed_at < SOON
            self._breaks = self._breaks + 1 if soon else 0
            # After the third one in a row, raise, or this would be a loop without a pause.
            if self._breaks == 3:
                self._breaks = 0
                raise
            return False
        except BaseException:
            # This includes interrupts: messages may be lost, also those for other waiters.
            self._drop(connection)
            raise
        return True

    def _ping_if_silent(self, connection: Connection) -> None:
        now = clock.now()
        if not self._pinged_at and now - self._heard_at > SILENCE:
            self._pinged_at = now
            connection.send(_PING)

    def _deliver(self, reply: Any) -> None:
        """Handle what was read: a message, or the answer to a PING."""
        self._heard_at, self._pinged_at = clock.now(), 0.0
        message = read_message(reply[-1]) if reply[0] == b"message" else None
        if message is None:
            return
        if message.read_at - self._pruned_at > PRUNE_EVERY or len(self._messages) > MOST_KEPT:
            self._prune(message.read_at)
        if message.owner in self._messages:
            # Either may be forged or outdated.
            message = HandoverMessage(message.owner, 0, message.read_at)
        # Store the message first, so that a waiter that starts right now finds it.
        self._messages[message.owner] = message
        reached("listener.message", waiter=message.owner)
        waiter = self._waiters.by_owner.get(message.owner)
        if waiter is not None:
            waiter.wake()

    def _prune(self, now: float) -> None:
        """Drop the messages of owners that do not wait: old ones, or all if there are too many."""
        self._pruned_at = now
        # Keep that of a waiter that was woken and has not run since.
        others = {
            owner: message.read_at
            for owner, message in self._messages.copy().items()
            if owner not in self._waiters.by_owner
        }
        too_many = len(others) > MOST_KEPT / 2
        if too_many:
            # Before dropping them: whoever sent a request and does not wait yet asks again.
            self._complete_since = clock.now()
        for owner, read_at in others.items():
            if too_many or now - read_at > KEPT_FOR:
                self._messages.pop(owner, None)

    def _drop(self, connection: Connection | None) -> None:
        if connection is not None:
            if self._connection is connection:
                self._connection = None
            connection.close()
            self._wake_all()

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            waiter.wake()


_PING = b"*1\r\n$4\r\nPING\r\n"
_READER = ""
"""The "owner" of the thread that reads for coroutines; real owners are never empty."""
