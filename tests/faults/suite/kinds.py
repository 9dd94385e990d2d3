"""The kinds of tasks that are compared; known to workers and driver."""

from __future__ import annotations

__all__ = [
    "ACKS",
    "EARLY",
    "FOLLOWER",
    "FOLLOWERS",
    "GUARDED",
    "HOOK_FOLLOWER",
    "KINDS",
    "LONG_TTL",
    "PLAIN",
    "RECORDED_FOLLOWER",
    "SHORT_TTL",
]

GUARDED, PLAIN, EARLY = KINDS = ("guarded", "plain", "early")

FOLLOWER, RECORDED_FOLLOWER = FOLLOWERS = ("follower", "recorded_follower")
"""The tasks that a guarded body sends for each key; the second one has a record of its own."""

HOOK_FOLLOWER = "hook_follower"
"""What a guarded body sends with ``transaction.on_commit()``, where that is compared."""

ACKS = {
    GUARDED: "late, reject_on_worker_lost",
    PLAIN: "late, reject_on_worker_lost",
    EARLY: "early (Celery's default)",
}

SHORT_TTL = 3.0
"""Seconds, of the lock where the end of a lease is part of the fault."""

LONG_TTL = 30.0
"""Seconds, of the lock everywhere else: whoever waits for its end is seen to."""
