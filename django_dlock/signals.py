"""Signals about locks; the sender is always the ``Lock`` class.

Every receiver gets ``name``, ``alias``, ``owner``, ``token`` and ``metadata`` and, where they
apply, ``reason``, ``waited`` and ``held_for`` (seconds). They go out by ``send_robust`` on a
thread of their own, so that no receiver can delay or prevent a renewal or a release.
"""

from __future__ import annotations

from django.dispatch import Signal

__all__ = ["acquired", "broken", "contended", "in_doubt", "lost", "released", "renewed"]

acquired = Signal()
"""A lease was granted; ``waited``."""
contended = Signal()
"""An attempt met a holder; ``owner`` and ``token`` are the waiter's own, so ``None``."""
renewed = Signal()
"""A lease was prolonged."""
in_doubt = Signal()
"""Nothing was confirmed for half the TTL; the deadline is not reached."""
lost = Signal()
"""A lease ended under its holder; ``reason`` and ``held_for``."""
released = Signal()
"""The holder gave it back; ``held_for``. ``reason`` is ``parked`` where it waits for a retry."""
broken = Signal()
"""An operator, or a proof of death, ended somebody's lease; ``reason``."""

LONG_WAIT = 30.0
"""Seconds of waiting from which on a grant is written to the lock events."""
waited_long = Signal()
"""Not public; ``acquired`` after a long wait, for the lock events. A receiver of ``acquired``
itself would cost every acquire a hand-over to the events thread."""
