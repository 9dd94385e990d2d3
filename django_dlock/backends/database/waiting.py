"""How a waiter waits: for its own notification, or by asking again."""

from __future__ import annotations

import random
from typing import cast

from ... import clock
from ...lease import Contention, Lease, LeaseRequest
from .rows import TICKET_TTL, WaitInfo

SHORTEST_PAUSE = 0.005
"""Seconds before a waiter that gets no notification asks again."""


def patience(met: Contention, until: float) -> float:
    """Seconds after which a waiter that gets no notification asks again."""
    # Asking again renews the ticket.
    ask_again = TICKET_TTL * random.uniform(0.4, 0.5)
    return max(0.0, min(until - clock.now(), met.remaining + 0.002, ask_again))


def handed_over(request: LeaseRequest, met: Contention, payload: str) -> tuple[Lease, str] | None:
    """The lease that a notification grants, if enough of it is left, and the notification's MAC."""
    token, _, mac = payload.partition(" ")[2].partition(" ")
    info = cast(WaitInfo, met.ticket)
    # The TTL counts from the request, which was sent before the hand-over.
    late = clock.now() - info.asked_at > request.ttl / 3
    # ``isdecimal`` takes digits of every script, and ``int`` refuses thousands of them.
    whole = token.isascii() and token.isdecimal() and len(token) < 20
    if not whole or int(token) <= info.token or not request.renewed or late:
        return None
    return Lease(request.name, request.owner, int(token), request.ttl, info.asked_at), mac


def pause(met: Contention, until: float, longest: float) -> float:
    """Seconds after which a waiter without notifications asks again.

    The pause grows with the age of the lease in the way, so that it stays short if the lock is held
    for a short time. It also grows with the number of earlier waiters.
    """
    info = cast(WaitInfo, met.ticket)
    seconds = min(max(SHORTEST_PAUSE, info.age / 8) * (1 + info.position), longest)
    # Jitter keeps many waiters from asking at once.
    seconds *= random.uniform(0.75, 1.25)
    return max(0.0, min(seconds, met.remaining + 0.001, until - clock.now()))
