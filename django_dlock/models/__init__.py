"""The package's tables, in modules by what they are about."""

from .locks import Fence, HeldLock, LockEvent
from .records import FollowUp, IdempotencyRecord
from .statistics import LockStatistics
from .stores import FailoverRecord, LeaseRecord, ProcessRecord

__all__ = [
    "FailoverRecord",
    "Fence",
    "FollowUp",
    "HeldLock",
    "IdempotencyRecord",
    "LeaseRecord",
    "LockEvent",
    "LockStatistics",
    "ProcessRecord",
]
