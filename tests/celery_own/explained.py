"""Which of Celery's own tests end differently under django-dlock, and why that is correct."""

from __future__ import annotations

from fnmatch import fnmatchcase

HOWS = ("lock", "record")
"""The lock alone, and a record per task id."""

LEFT_OUT = {"t/integration/test_backend.py": "needs an account of Azure; skipped without"}
"""Files that are not run in any of the three ways."""

APART = (
    "*/test_redis_backend.py::*",
    "*/test_worker.py::*",
    "*/test_serialization.py::*",
    "*/test_backend_leak_in_fixture_teardown.py::*",
    "*_large_header",
)
"""Tests that need a separate process, because they inspect its state or take minutes."""

LATE = (
    "LockedTask sets acks_late=True: the message of a running task is not acknowledged yet, and "
    "inspection says so"
)
DUPLICATE = (
    "a task id that has succeeded gets its recorded result: the tasks of a chord that was "
    "frozen keep their ids, so the second application is a duplicate and runs nothing"
)

EXPLAINED: tuple[tuple[str, str, str], ...] = (
    ("*", "*/test_inspect.py::*::test_active", LATE),
    ("*", "*/test_inspect.py::*::test_query_task", LATE),
    ("record", "*::test_reapplying_frozen_chord_dispatches_body_again", DUPLICATE),
)
"""How (or ``*``), pattern of test ids, reason. Keep it short: users must know all of it."""


def explanation(how: str, test: str) -> str:
    """Why the test may end differently; empty if it may not."""
    for which, pattern, reason in EXPLAINED:
        if which in ("*", how) and fnmatchcase(test, pattern):
            return reason
    return ""
