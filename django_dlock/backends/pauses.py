"""How long a waiter that gets no wake-up pauses."""

from __future__ import annotations

import random

from .. import clock
from ..lease import Contention, LeaseRequest

SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two attempts."""


def pause(request: LeaseRequest, contention: Contention, until: float) -> float:
    """Seconds until the waiter tries again; they grow with the time that it has waited."""
    now = clock.now()
    seconds = min(max(SHORTEST_PAUSE, (now - request.since) / 8), LONGEST_PAUSE)
    # Jitter keeps many waiters from asking at once.
    seconds *= random.uniform(0.75, 1.25)
    return max(0.0, min(seconds, contention.remaining, until - now))
