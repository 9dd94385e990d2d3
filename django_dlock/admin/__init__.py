"""Held locks, idempotency records and lock events in the Django admin."""

from __future__ import annotations

from .events import LockEventAdmin
from .held_locks import HeldLockAdmin
from .locked_object import LockedObjectAdmin
from .records import IdempotencyRecordAdmin

__all__ = ["HeldLockAdmin", "IdempotencyRecordAdmin", "LockEventAdmin", "LockedObjectAdmin"]
