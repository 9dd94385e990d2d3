"""The kinds of tasks that are compared; used by workers and driver."""

from __future__ import annotations

GUARDED, PLAIN, EARLY = KINDS = ("guarded", "plain", "early")

FOLLOWER, RECORDED_FOLLOWER = FOLLOWERS = ("follower", "recorded_follower")
"""The tasks that a guarded body sends for each key; the second one has its own record."""

HOOK_FOLLOWER = "hook_follower"
"""The task that a guarded body also sends with ``transaction.on_commit()``, for comparison."""

ACKS = {
    GUARDED: "late, reject_on_worker_lost",
    PLAIN: "late, reject_on_worker_lost",
    EARLY: "early (Celery's default)",
}

NOISE = "noise"
"""The task and the queue of messages that nobody runs."""

SHORT_TTL = 3.0
"""TTL in seconds where the end of a lease is part of the fault."""

LONG_TTL = 30.0
"""TTL in seconds everywhere else; there, nobody should have to wait for the end of a lease."""
