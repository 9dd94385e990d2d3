"""Repeats the fault tests with every backend call awaited on an event loop."""

from __future__ import annotations

import pytest

from tests.faults import test_g10_bounded
from tests.faults.test_g01_lease import *  # noqa: F403
from tests.faults.test_g02_told import *  # noqa: F403
from tests.faults.test_g04_recovers import *  # noqa: F403
from tests.faults.test_g05_idempotent import *  # noqa: F403
from tests.faults.test_g07_interrupt import *  # noqa: F403
from tests.faults.test_g08_fork import *  # noqa: F403
from tests.faults.test_g10_bounded import *  # noqa: F403
from tests.support import aliases

# This interrupts every line of Python, including the code that connects thread and loop.
# test_g07_cancelled.py tests the interruptions that coroutines can meet.
del test_g7_an_interrupt_anywhere_leaves_nothing_renewed  # noqa: F821
# Three busy threads leave the connecting code too little time for a command's timeout.
del test_g7_interrupts_keep_no_other_thread_from_the_lock  # noqa: F821
# Each child starts a loop, which a busy machine may not do within a command's timeout.
# tests/backends/test_redis_async.py has a similar test.
del test_g8_a_child_forked_while_threads_lock_can_lock  # noqa: F821


@pytest.fixture(autouse=True)
def awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "BACKEND", "tests.support.awaited.AwaitedRedisBackend")
    # Each call changes threads twice, which takes time on a busy machine. A wait without an end is
    # noticed anyway.
    monkeypatch.setattr(test_g10_bounded, "SLACK", 3.0)
