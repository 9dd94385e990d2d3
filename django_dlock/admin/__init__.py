"""Held locks, idempotency records, lock events and lock statistics in the Django admin."""

from __future__ import annotations

from .events import LockEventAdmin
from .held_locks import HeldLockAdmin
from .locked_object import LockedObjectAdmin
from .records import IdempotencyRecordAdmin
from .statistics import LockStatisticsAdmin

__all__ = [
    "HeldLockAdmin",
    "IdempotencyRecordAdmin",
    "LockEventAdmin",
    "LockStatisticsAdmin",
    "LockedObjectAdmin",
]
