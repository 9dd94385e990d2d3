"""The clock by which a holder decides whether its lease is still valid.

``CLOCK_MONOTONIC`` stops while a machine is suspended, but the lease at the backend does not: a
laptop that wakes up, or a virtual machine that is resumed, would rely on a lease that ended
hours ago. ``CLOCK_BOOTTIME`` includes suspension. So does ``CLOCK_MONOTONIC`` on macOS, but not
Python's ``time.monotonic`` there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

__all__ = ["DRIFT", "LONGEST", "now"]

DRIFT = 0.01
"""The fraction of a TTL by which two clocks may drift apart during one lease."""
LONGEST = 36_500 * 86_400
"""The longest duration that settings and options take, in seconds: 100 years. Every store, and
every sum of it and the present time, can express it."""


def _pick() -> Callable[[], float]:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if sys.platform == "darwin" and hasattr(time, "CLOCK_MONOTONIC"):
        return partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    return time.monotonic


now: Callable[[], float] = _pick()
"""Seconds, as a float, from an arbitrary start; never steps, includes suspension.

Always call it as ``clock.now()``, so that ``django_dlock.testing.FakeClock`` can replace it.
"""
