"""How a waiter waits: for a notification of its own, or until it asks again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

from ... import clock
from ...lease import Contention, Lease, LeaseRequest
from .rows import TICKET, Met, ticket_key
from .wakeup import Notification, Wakeup

__all__ = ["Expected", "pause"]

SHORTEST_PAUSE = 0.005
"""Seconds between two asks of a waiter that nothing wakes."""


class Expected:
    """The notification of one waiter, expected from before its ticket is stored.

    It is expected no more after the wait, or when nobody refers to this any more: whoever asked
    may never come to wait.
    """

    __slots__ = ("_notification", "channel")

    def __init__(self, wakeup: Wakeup, owner: str) -> None:
        self.channel = wakeup.channel
        self._notification: Notification | None = wakeup.expect(ticket_key(owner))
        self._notification.__enter__()

    @classmethod
    def of(cls, wakeup: Wakeup | None, request: LeaseRequest) -> Expected | None:
        """``None`` for one who does not wait, and where nothing wakes it."""
        return cls(wakeup, request.owner) if wakeup is not None and request.waits else None

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        notification, self._notification = self._notification, None
        if notification is not None:
            notification.__exit__()

    def wait(
        self,
        request: LeaseRequest,
        met: Contention,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        """The lease that was handed over; ``None`` where the owner had better ask."""
        notification = self._notification
        if notification is None:
            return None
        try:
            return _handed_over(request, met, notification.wait(_patience(met, until), interrupted))
        finally:
            self._leave()

    async def async_wait(
        self,
        request: LeaseRequest,
        met: Contention,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        """As ``wait``, for coroutines."""
        notification = self._notification
        if notification is None:
            return None
        try:
            patience = _patience(met, until)
            return _handed_over(request, met, await notification.async_wait(patience, interrupted))
        finally:
            self._leave()


def _patience(met: Contention, until: float) -> float:
    # A ticket is renewed by asking again.
    ask_again = TICKET * random.uniform(0.4, 0.5)
    return max(0.0, min(until - clock.now(), met.remaining + 0.002, ask_again))


def _handed_over(request: LeaseRequest, met: Contention, payload: str | None) -> Lease | None:
    """The lease that a notification tells of, if that is worth having as it is."""
    if payload is None:
        return None
    token = payload.rpartition(" ")[2]
    facts = cast(Met, met.ticket)
    # It counts from when it was asked for, which was before it was handed over.
    late = clock.now() - facts.asked_at > request.ttl / 3
    if not token.isdecimal() or int(token) <= facts.token or not request.renewed or late:
        return None
    return Lease(request.name, request.owner, int(token), request.ttl, facts.asked_at)


def pause(met: Contention, until: float, longest: float) -> float:
    """Seconds after which a waiter that nothing wakes asks again.

    The longer the lease in the way has lived, the longer, so that hand-over costs a short time
    beside a short hold; and the more waiters come before, the longer.
    """
    facts = cast(Met, met.ticket)
    seconds = min(max(SHORTEST_PAUSE, facts.age / 8) * (1 + facts.place), longest)
    # Jitter keeps many waiters from asking at once.
    seconds *= random.uniform(0.75, 1.25)
    return max(0.0, min(seconds, met.remaining + 0.001, until - clock.now()))
