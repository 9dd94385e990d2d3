"""The grants that this process has, as its locks and its watchdog know them."""

from __future__ import annotations

from django_dlock import Lock, locks
from django_dlock.core.held_lease import HeldLease, registry


def leases_in(using: str = "default") -> list[HeldLease]:
    """The grants of an alias that this process holds, each once."""
    return registry.leases_of(locks[using])


def lease_of(lock: Lock) -> HeldLease:
    """The grant that the lock holds; it may be kept, to see how it ends."""
    (found,) = (held for held in leases_in(lock.alias) if held.owner == lock.owner)
    return found
