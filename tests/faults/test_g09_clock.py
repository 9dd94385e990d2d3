"""G9: wall clocks of clients decide nothing."""

from __future__ import annotations

import time

import pytest

from django_dlock import Lock, locks
from tests.faults.conftest import LEASE
from tests.support.aliases import LONG, TTL, Dlocks
from tests.support.databases import until
from tests.support.holder import Holder

DAY = 86400.0


@pytest.mark.parametrize("offset", [-DAY, DAY], ids=["back", "ahead"])
def test_g9_a_step_of_the_clients_clock_has_no_effect(
    offset: float, dlocks: Dlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, other = Lock("it"), Lock("it", bound=False)
    lock.acquire()
    token = lock.token or 0
    true_time, true_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: true_time() + offset)
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + int(offset * 1e9))
    # The lease is renewed, shown and waited for as before, past its first end.
    assert not other.acquire(timeout=2 * TTL)
    # A busy machine may have let it come into doubt again.
    until(lambda: lock.state == "held")
    assert 0 < lock.remaining <= LEASE
    info = locks["default"].get("it")
    assert info is not None
    assert 2 * TTL <= info.age < DAY / 2
    lock.release()
    with other:
        assert token < (other.token or 0) < token + 1e6 * DAY / 2


SET_CLOCK = """
import time
true_time, true_ns = time.time, time.time_ns
time.time = lambda: true_time() + offset
time.time_ns = lambda: true_ns() + int(offset * 1e9)
"""


@pytest.mark.parametrize("offset", [-DAY, DAY], ids=["back", "ahead"])
def test_g9_holders_whose_clocks_differ_by_a_day_exclude_each_other(
    offset: float, dlocks: Dlocks, holder: Holder
) -> None:
    holder.do(f"offset = {offset}")
    holder.do(SET_CLOCK)
    holder.do("lock = Lock('it'); lock.acquire()")
    token = holder.do("lock.token")
    assert not Lock("it").acquire(timeout=2 * TTL)
    # While the lock is held, the clock steps to the other side.
    holder.do(f"offset = {-offset}")
    assert not Lock("it").acquire(timeout=2 * TTL)
    assert holder.do("lock.held")
    holder.do("lock.release()")
    with Lock("it", ttl=LONG) as mine:
        assert token < (mine.token or 0) < token + 1e6 * DAY / 2
        assert not holder.do("lock.acquire(timeout=0.1)")
