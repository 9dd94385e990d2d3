"""Reentrant handles that share one lease: each keeps what it was asked for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock import LeaseLost, Lock, clock, locks, signals
from django_dlock.core import dispatch
from tests.support.leases import lease_of


@pytest.fixture(autouse=True)
def _fresh_local() -> Iterator[None]:
    locks.reset()
    yield
    assert not local().locked(), "a lease is left"


def local(**options: Any) -> Lock:
    return Lock("it", using="local", wait=0, reentrant=True, **options)


def test_g6_a_lease_is_renewed_while_the_inner_handle_holds_it() -> None:
    outer, inner = local(), local()
    outer.acquire()
    inner.acquire()
    lease = lease_of(inner)
    del outer
    gc.collect()
    assert lease.renews
    with local() as third:
        assert third.token == inner.token, "it is still found by its holder"
    inner.release()


def test_g2_on_lost_of_each_handle_is_called_once() -> None:
    told: list[tuple[Lock, str]] = []
    outer = local(on_lost=lambda *what: told.append(("outer", *what)))  # type: ignore[arg-type]
    inner = local(on_lost=lambda *what: told.append(("inner", *what)))  # type: ignore[arg-type]
    gone = local(on_lost=lambda *what: told.append(("gone", *what)))  # type: ignore[arg-type]
    outer.acquire()
    inner.acquire()
    inner.acquire()
    with gone:
        pass
    locks["local"].break_("it", owner=inner.owner or "")
    with pytest.raises(LeaseLost):
        inner.renew()
    assert dispatch.flush(30)
    assert told == [("outer", outer, "broken"), ("inner", inner, "broken")]


def test_g6_the_shortest_max_hold_counts_while_its_handle_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    with pytest.raises(LeaseLost, match="max_hold"), local(max_hold=100) as outer:
        with local(max_hold=10):
            assert outer.remaining <= 10
            info = locks["local"].get("it")
            assert info is not None
            assert (info.ttl or 0) <= 10, "in the store, too"
            now[0] += 5
        # The inner one has ended in time, so only the limit of the outer one counts.
        outer.renew()
        assert 20 < outer.remaining <= 30
        with pytest.raises(LeaseLost, match="max_hold"), local(max_hold=10):
            now[0] += 11


def test_g2_a_lock_that_is_entered_after_its_lease_was_lost_is_acquired() -> None:
    outer, inner = local(), local(max_hold=5)
    outer.acquire()
    assert locks["local"].break_("it", owner=outer.owner or "")
    # Nobody has noticed yet.
    assert outer.held
    assert inner.acquire()
    inner.check()
    inner.release()
    with pytest.raises(LeaseLost):
        outer.release()


def test_the_longest_min_hold_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    with local(min_hold=10):
        now[0] += 5
        with local(min_hold=8):
            pass
    now[0] += 7.5
    assert local().locked()
    now[0] += 1
    assert not local().locked()


def test_g6_a_fixed_lease_is_renewed_while_a_handle_that_renews_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    with local(renew=False, ttl=5) as outer:
        lease = lease_of(outer)
        with local(ttl=30) as inner:
            assert lease.due < lease.deadline
            inner.renew()
            assert outer.remaining > 20
        assert lease.due == lease.deadline


def test_g2_a_fixed_lease_outlives_the_max_hold_of_a_handle_that_has_left() -> None:
    renewed = threading.Event()
    signals.renewed.connect(tell := lambda **_: renewed.set())
    try:
        with local(renew=False, ttl=60) as outer:
            with local(max_hold=20):
                assert outer.remaining <= 20
            assert renewed.wait(20)
            assert outer.remaining > 40
    finally:
        signals.renewed.disconnect(tell)
