"""When a process may grant leases in the active store, and until when they may last.

A process knows which store is active only from the record, and what it has read grows old. These
rules keep two processes from granting one name in two stores:

* What was read counts for V seconds (``view_ttl``), from before the read. Only in that time does a
  process acquire.
* A lease ends at the latest V plus the longest TTL after the read that it relies on. The last read
  of an epoch comes before the switch, so all its leases end at most that long after the switch.
* In the new epoch nothing is granted until that time has passed since the switch, and a little
  more, because clocks may drift apart.

The record has the largest of these times among all processes, because their settings may differ
during a deployment.
"""

from __future__ import annotations

from typing import NamedTuple

from ... import clock
from .record import Reading


class View(NamedTuple):
    """What a process knows about the active store; all times are on ``clock.now()``.

    Attributes:
        epoch: Rises by one with every switch.
        active: The alias of the active store.
        valid_until: Until then this process may acquire.
        latest_end: No lease that relies on this view ends later.
        opens_at: When all leases of the previous epoch are over.
        reading: What was read.
    """

    epoch: int
    active: str
    valid_until: float
    latest_end: float
    opens_at: float
    reading: Reading


def view_of(
    reading: Reading, asked_at: float, answered_at: float, view_ttl: float, max_ttl: float
) -> View:
    """The view that a read gives.

    Args:
        asked_at, answered_at: Before and after the read.
    """
    # The database measured the time since the switch before its answer arrived; more has passed
    # since. A clock that was set back shows less than has passed.
    passed = max(0.0, reading.elapsed)
    left = max(0.0, quiet_after(reading) - passed)
    return View(
        reading.epoch,
        reading.active,
        asked_at + view_ttl,
        asked_at + view_ttl + max_ttl,
        answered_at + left if left else answered_at - 1.0,
        reading,
    )


def quiet_after(reading: Reading) -> float:
    """Seconds after the switch for which nothing is granted."""
    return reading.quiet * (1 + clock.DRIFT)
