"""Where a waiter of this process receives the notification of its lease, and waits for it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import partial

from ... import clock
from ...process.points import reached
from ..shared.waiting import Waiter, Waiters, poll_at

MOST_KEPT = 2
"""Notifications that are kept for one waiter; a stranger may send any number."""


class _Notified(Waiter):
    __slots__ = ("payloads",)

    def __init__(self, owner: str) -> None:
        super().__init__(owner)
        # Only the first one counts, because after any of them its waiter asks again.
        self.payloads = collections.deque[str](maxlen=MOST_KEPT)


class NotifiedWaiters(Waiters[_Notified]):
    """Everybody in this process who waits for a notification.

    Args:
        ensure_listening: Called for each of them, and again while nothing listens; never blocks.

    Attributes:
        subscribed: A notification sent now will arrive, as far as is known.
        works: False if listening has failed, or a pooler drops notifications.
    """

    def __init__(self, ensure_listening: Callable[[], None]) -> None:
        super().__init__()
        self.ensure_listening = ensure_listening
        self.subscribed, self.works = False, True

    def forget(self) -> None:
        super().forget()
        self.subscribed, self.works = False, True

    def change(self, *, subscribed: bool, works: bool) -> None:
        """Note whether the process listens; each waiter asks again."""
        self.subscribed, self.works = subscribed, works
        self.end_waits()

    def deliver(self, payload: str) -> None:
        """Wake the waiter whose owner is the first word.

        If it has left, the payload is dropped: a waiter that leaves asks once more or cancels its
        acquire, and the row has the lease.
        """
        waiter = self.by_owner.get(payload.partition(" ")[0])
        if waiter is not None:
            # Store the payload first: a waiter that calls ``wait`` now finds it.
            waiter.payloads.append(payload)
            reached("listener.message", waiter=waiter.owner)
            waiter.wake()


class PendingNotification:
    """What is sent to one waiter until the end of its wait.

    Made before the ticket is stored. It is unregistered after the wait, or when it is garbage: a
    caller that asked may never wait.
    """

    __slots__ = ("_waiter", "_waiters", "channel")

    def __init__(self, waiters: NotifiedWaiters, owner: str, channel: str) -> None:
        self._waiters, self._waiter, self.channel = waiters, _Notified(owner), channel
        waiters.enter(self._waiter)

    def __del__(self) -> None:
        # An interrupt may have ended ``__init__``.
        if (waiter := getattr(self, "_waiter", None)) is not None:
            self._waiters.leave(waiter)

    def listen(self) -> None:
        """Begin to listen, if the process does not, because the caller has to wait.

        Most callers get their lease at once, and do not keep the connection open. A ticket that was
        stored before misses nothing: its waiter asks again when listening begins.
        """
        self._waiter.waits = True
        self._waiters.ensure_listening()

    def wait(self, timeout: float, interrupted: Callable[[], bool]) -> str | None:
        """Block until the owner is notified; ``None`` means "ask again", and may be a false alarm.

        Args:
            timeout: Seconds; shortened to a few tenths of a second while nothing listens.
            interrupted: See ``Waiters.wait``.

        Returns:
            The payload as it was sent, including the owner.
        """
        waiter = self._waiter
        is_over = partial(bool, waiter.payloads)
        self._waiters.wait(waiter, self._until(timeout), interrupted, is_over)
        return waiter.payloads.popleft() if waiter.payloads else None

    async def async_wait(
        self, timeout: float, interrupted: Callable[[], bool], abandoned: Callable[[], object]
    ) -> str | None:
        """As ``wait``, for coroutines; uses no thread.

        Args:
            abandoned: See ``Waiters.async_wait``.
        """
        waiter = self._waiter
        is_over = partial(bool, waiter.payloads)
        until = self._until(timeout)
        await self._waiters.async_wait(waiter, until, interrupted, abandoned, is_over)
        return waiter.payloads.popleft() if waiter.payloads else None

    def _until(self, timeout: float) -> float:
        self.listen()
        until = clock.now() + timeout
        return until if self._waiters.subscribed else poll_at(until)
