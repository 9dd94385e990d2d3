"""Repeats on an event loop the fault tests whose outcome a coroutine's own code decides.

A coroutine reaches Redis by ``acall``, which lets a thread make the same call as in the other
tests, until the call's deadline; and it waits in ``async_wait``, which is code of its own. So here
are those tests only in which somebody waits, or in which nobody answers a call. Cancellations are
in ``test_g07_cancelled.py``; forks under a running loop in ``tests/backends/test_redis_async.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import test_g10_bounded
from tests.faults.test_g01_lease import (  # noqa: F401
    test_g1_a_body_longer_than_the_ttl_keeps_every_waiter_out,
    test_g1_lost_scripts_and_killed_clients_lose_no_lock,
)
from tests.faults.test_g04_recovers import (  # noqa: F401
    test_g4_a_waiter_on_the_same_machine_gets_the_lock_of_a_killed_holder_within_a_second,
)
from tests.faults.test_g05_idempotent import (  # noqa: F401
    connected,
    test_g5_a_release_without_an_answer_is_repeated_in_the_background,
    test_g5_an_acquire_without_an_answer_is_cancelled,
)
from tests.faults.test_g08_fork import (  # noqa: F401
    parent,
    test_g8_a_child_renews_its_own_lock_and_waits_for_its_parents,
)
from tests.faults.test_g10_bounded import (  # noqa: F401
    cut_off,
    test_g10_a_waiter_returns_in_time_when_the_backend_becomes_unreachable,
    test_g10_release_and_renew_return_in_time,
)
from tests.support import aliases
from tests.support.aliases import Dlocks
from tests.support.proxy import Proxy


@pytest.fixture(autouse=True)
def awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "BACKEND", "tests.support.awaited.AwaitedRedisBackend")
    # Each call changes threads twice, which takes time on a busy machine. A wait without an end is
    # noticed anyway.
    monkeypatch.setattr(test_g10_bounded, "SLACK", 3.0)


@pytest.fixture
def silent(dlocks: Dlocks, proxy: Proxy) -> Iterator[Proxy]:
    """As in ``test_g05_idempotent.py``, in one of the ways to connect."""
    with connected("a URL", dlocks, proxy, command_timeout=1.0):
        yield proxy
