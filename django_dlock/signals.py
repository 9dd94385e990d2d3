"""Signals about locks; the sender is always the ``Lock`` class.

Every receiver gets ``name``, ``alias``, ``owner``, ``token`` and ``metadata`` and, if they
apply, ``reason``, ``waited`` and ``held_for`` (seconds). ``core/dispatch.py`` calls the receivers
as ``send_robust`` does, but on a thread of its own, so that none can delay or prevent a renewal or
a release.
"""

from __future__ import annotations

import threading
from typing import Any

from django.dispatch import Signal

from . import process

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


class _LockSignal(Signal):
    """A signal that may be sent anywhere: by a finalizer, a signal handler, a forked child.

    Django's own lock lets a thread wait for itself for ever if garbage is collected, or a signal
    handler runs, while the thread has that lock; and a child, if another thread had it at the fork.
    """

    def __init__(self) -> None:
        super().__init__()
        self._renew_lock()

    def connect(self, *args: Any, **kwargs: Any) -> None:
        process.at_fork(after_in_child=self._renew_lock)
        super().connect(*args, **kwargs)

    def _renew_lock(self) -> None:
        self.lock = threading.RLock()  # type: ignore[assignment]


acquired = _LockSignal()
"""A lease was granted; ``waited``."""
contended = _LockSignal()
"""An acquire found the name held; ``owner`` and ``token`` are ``None``."""
renewed = _LockSignal()
"""A lease was prolonged, in the background or by ``renew()``."""
in_doubt = _LockSignal()
"""Nothing was confirmed for half the TTL, but the deadline has not passed."""
lost = _LockSignal()
"""A lease ended while held; ``reason`` and ``held_for``."""
released = _LockSignal()
"""The holder released it; ``held_for``. ``reason`` is ``parked`` if it is kept for a retry,
and ``unanswered`` if the backend gave no answer; then the release is repeated."""
broken = _LockSignal()
"""An operator, ``break_()`` or a proof of death ended somebody's lease; ``reason``."""
store_switched = _LockSignal()
"""Fail-over keeps the locks of ``alias`` in another store: ``active``, ``previous``, ``epoch``,
``reason`` and ``switched_by``. About no lock, so it has none of the arguments above. Sent in each
process that uses the alias."""

LONG_WAIT = 30.0
"""Seconds of waiting after which an acquire is recorded as a lock event."""
gave_up = _LockSignal()
"""Not public: an acquire has ended without a lease; ``reason`` is ``contended`` or
``unavailable``."""
renewal_due = _LockSignal()
"""Not public: the renewal thread has turned to leases that were due, ``late`` seconds too late."""
requeued = _LockSignal()
"""Not public: a delivery was put back into its queue; ``task``, ``task_id`` and ``reason``: that of
``gave_up`` if its lock was not acquired, else ``in_progress`` or ``other``."""
stopped_waiting = _LockSignal()
"""Not public: an acquire that had sent ``contended`` has ended, whether granted or not."""
waited_long = _LockSignal()
"""Not public: ``acquired`` after a long wait, for the lock events. Receiving ``acquired`` instead
would slow down every acquire."""
