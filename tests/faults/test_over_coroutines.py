"""The fault tests once more, with every call of the backend awaited on an event loop."""

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

# Interrupts every line of Python, those of the bridge between thread and loop included. What may
# be done to a coroutine is done in test_g07_cancelled.py.
del test_g7_an_interrupt_anywhere_leaves_nothing_renewed  # noqa: F821
# Three threads that never rest leave the bridge too little time for a command's timeout.
del test_g7_interrupts_keep_nobody_else_from_the_lock  # noqa: F821
# Each child starts a loop, which a busy machine does not always do within a command's timeout.
# Its like is in tests/backends/test_redis_async.py.
del test_g8_a_child_forked_while_threads_lock_can_lock  # noqa: F821


@pytest.fixture(autouse=True)
def awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "BACKEND", "tests.support.awaited.AwaitedRedisBackend")
    # Each call changes threads twice, which a busy machine takes its time for. A wait without an
    # end is found out all the same.
    monkeypatch.setattr(test_g10_bounded, "SLACK", 3.0)
