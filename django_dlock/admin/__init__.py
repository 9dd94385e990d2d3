"""Held locks, records, follow-ups, lock events and lock statistics in the Django admin."""

from __future__ import annotations

from .events import LockEventAdmin
from .follow_ups import FollowUpAdmin
from .held_locks import HeldLockAdmin
from .locked_object import LockedObjectAdmin
from .records import IdempotencyRecordAdmin
from .statistics import LockStatisticsAdmin

__all__ = [
    "FollowUpAdmin",
    "HeldLockAdmin",
    "IdempotencyRecordAdmin",
    "LockEventAdmin",
    "LockStatisticsAdmin",
    "LockedObjectAdmin",
]
