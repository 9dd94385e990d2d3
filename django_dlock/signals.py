"""Signals about locks; the sender is always the ``Lock`` class.

Every receiver gets ``name``, ``alias``, ``owner``, ``token`` and ``metadata`` and, if they
apply, ``reason``, ``waited`` and ``held_for`` (seconds). ``core/dispatch.py`` calls the receivers
as ``send_robust`` does, but on a thread of its own, so that none can delay or prevent a renewal or
a release.
"""

from __future__ import annotations

from django.dispatch import Signal

__all__ = [
    "acquired",
    "broken",
    "contended",
    "in_doubt",
    "lost",
    "released",
    "renewed",
    "store_switched",
]

acquired = Signal()
"""A lease was granted; ``waited``."""
contended = Signal()
"""An acquire found the name held; ``owner`` and ``token`` are ``None``."""
renewed = Signal()
"""A lease was prolonged, in the background or by ``renew()``."""
in_doubt = Signal()
"""Nothing was confirmed for half the TTL, but the deadline has not passed."""
lost = Signal()
"""A lease ended while held; ``reason`` and ``held_for``."""
released = Signal()
"""The holder released it; ``held_for``. ``reason`` is ``parked`` if it is kept for a retry,
and ``unanswered`` if the backend gave no answer; then the release is repeated."""
broken = Signal()
"""An operator, ``break_()`` or a proof of death ended somebody's lease; ``reason``."""
store_switched = Signal()
"""Fail-over keeps the locks of ``alias`` in another store: ``active``, ``previous``, ``epoch``,
``reason`` and ``switched_by``. About no lock, so it has none of the arguments above. Sent in each
process that uses the alias."""

LONG_WAIT = 30.0
"""Seconds of waiting after which an acquire is recorded as a lock event."""
gave_up = Signal()
"""Not public: an acquire has ended without a lease; ``reason`` is ``contended`` or
``unavailable``."""
renewal_due = Signal()
"""Not public: the renewal thread has turned to leases that were due, ``late`` seconds too late."""
requeued = Signal()
"""Not public: a delivery was put back into its queue; ``task``, ``task_id`` and ``reason``:
``contended``, ``unavailable`` or ``other``."""
stopped_waiting = Signal()
"""Not public: an acquire that had sent ``contended`` has ended, whether granted or not."""
waited_long = Signal()
"""Not public: ``acquired`` after a long wait, for the lock events. Receiving ``acquired`` instead
would slow down every acquire."""
