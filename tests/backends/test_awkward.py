"""A store with few capabilities still fulfils the contract, and ``Lock`` works with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from django_dlock import BackendUnavailable, LeaseLost, Lock, LockedTask, clock, locks
from django_dlock.backends.base import AliasOptions
from django_dlock.core import watchdog
from django_dlock.testing import BackendContract
from tests.support.aliases import configured
from tests.support.awkward import GRANTED, AwkwardBackend

TTL = 6.0
"""Seconds; the store grants half of it."""


@pytest.fixture
def backend() -> AwkwardBackend:
    return AwkwardBackend(AliasOptions(alias="awkward", backend=""))


class TestAwkward(BackendContract):
    pass


@pytest.fixture
def store() -> Iterator[AwkwardBackend]:
    """The store of the default alias."""
    entry: dict[str, Any] = {
        "BACKEND": "tests.support.awkward.AwkwardBackend",
        "TTL": TTL,
        "WAIT": 30,
        "OPTIONS": {"command_timeout": 0.5},
    }
    with configured({"default": entry}):
        store = locks["default"]
        assert isinstance(store, AwkwardBackend)
        yield store


def eventually(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def test_g1_a_lease_is_renewed_for_as_long_as_it_is_held(store: AwkwardBackend) -> None:
    with Lock("it") as lock:
        began, longest = clock.now(), 0.0
        while clock.now() < began + 0.75 * TTL:
            longest = max(longest, lock.remaining)
            lock.check()
            assert store.get("it")
            time.sleep(0.01)
        assert 0 < longest <= TTL * GRANTED
    assert not store.locked("it", deadline=store.call_deadline())


def test_g1_more_leases_than_one_call_takes_are_all_renewed(store: AwkwardBackend) -> None:
    held = [Lock(f"n{number}") for number in range(3 * store.renewals_per_call + 1)]
    assert all(lock.acquire() for lock in held)
    eventually(lambda: sum(store.renewed) >= 4 * len(held))
    assert all(lock.held for lock in held)
    # The store needs no heartbeats: each call renews.
    assert min(store.renewed) >= 1
    assert max(store.renewed) == store.renewals_per_call
    watchdog.shutdown()
    assert {lock.lost_reason for lock in held} == {"exit"}
    assert store.rows == {}


def test_threads_take_turns(store: AwkwardBackend) -> None:
    inside, most, turns = [0], [0], [0]

    def work() -> None:
        for _ in range(3):
            with Lock("it"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                turns[0] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (most, turns) == ([1], [18])


async def test_coroutines_take_turns(store: AwkwardBackend) -> None:
    inside, most, turns = 0, 0, 0

    async def work() -> None:
        nonlocal inside, most, turns
        for _ in range(3):
            async with Lock("it"):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.001)
                turns += 1
                inside -= 1

    await asyncio.gather(*(work() for _ in range(6)))
    assert (most, turns) == (1, 18)


async def test_a_coroutine_renews_and_asks_whether_the_lock_is_held(store: AwkwardBackend) -> None:
    async with Lock("it", ttl=10.0) as lock:
        await lock.arenew(ttl=20.0)
        assert 20 * GRANTED - 4 < lock.remaining <= 20 * GRANTED
        assert await lock.alocked()
    assert not await lock.alocked()


def test_a_waiter_gives_up_when_its_time_is_over(store: AwkwardBackend) -> None:
    with Lock("it"):
        assert not Lock("it", bound=False).acquire(timeout=0.2)
        assert not Lock("it", bound=False).acquire(blocking=False)


def test_a_shorter_renewal_by_the_holder_counts_at_once(store: AwkwardBackend) -> None:
    with Lock("it", ttl=60.0, renew=False) as lock:
        lock.renew(ttl=20.0)
        assert 20 * GRANTED - 5 < lock.remaining <= 20 * GRANTED
        info = store.get("it")
        assert info is not None
        assert info.ttl is not None
        assert lock.remaining < info.ttl <= 20


def test_g1_a_manual_renewal_without_an_answer_leaves_a_safe_deadline(
    store: AwkwardBackend,
) -> None:
    with Lock("it", ttl=20.0, renew=False) as lock:
        store.lost.append("renew")
        with pytest.raises(BackendUnavailable):
            lock.renew(ttl=12.0)
        info = store.get("it")
        assert info is not None
        assert info.ttl is not None
        assert lock.remaining < info.ttl


def test_g5_an_acquire_whose_answer_is_lost_finds_its_own_grant(store: AwkwardBackend) -> None:
    store.lost.append("acquire")
    with Lock("it") as lock:
        assert lock.token == 1


async def test_g5_an_awaited_acquire_whose_answer_is_lost_finds_its_own_grant(
    store: AwkwardBackend,
) -> None:
    store.lost.append("acquire")
    async with Lock("it") as lock:
        assert lock.token == 1


def test_g5_an_acquire_that_gives_up_is_cancelled(store: AwkwardBackend) -> None:
    store.lost.append("acquire")
    with pytest.raises(BackendUnavailable):
        Lock("it", ttl=60.0).acquire(blocking=False)
    eventually(lambda: not store.rows)


def test_g6_a_renewal_whose_answer_is_lost_is_repeated(store: AwkwardBackend) -> None:
    # Two lost answers and a pause of a busy machine are no more than its TTL.
    with Lock("it", ttl=1.5 * TTL) as lock:
        store.lost += ["renew"] * 2
        eventually(lambda: len(store.renewed) > 4)
        assert lock.held


def test_g5_a_release_whose_answer_is_lost_frees_the_name(store: AwkwardBackend) -> None:
    lock = Lock("it")
    assert lock.acquire()
    store.lost.append("release")
    with pytest.raises(BackendUnavailable):
        lock.release()
    assert lock.state == "free"
    eventually(lambda: "cancel_acquire" in store.called)
    with Lock("it"):
        pass


def test_g5_a_release_of_a_missing_lease_before_the_deadline_is_no_loss(
    store: AwkwardBackend, caplog: pytest.LogCaptureFixture
) -> None:
    lock = Lock("it", ttl=60.0)
    assert lock.acquire()
    # As if the client had repeated a release after a lost reply.
    store.break_silently("it", owner=lock.owner or "")
    with caplog.at_level("INFO", "django_dlock"):
        lock.release()
    assert lock.state == "free"
    assert "cannot tell" in caplog.text


def test_g2_a_release_after_the_deadline_is_a_loss(store: AwkwardBackend) -> None:
    lock = Lock("it", renew=False)
    assert lock.acquire()
    eventually(lambda: lock.lost)
    with pytest.raises(LeaseLost, match="expired"):
        lock.release()


def test_g2_a_renewal_reports_a_lease_that_vanished(store: AwkwardBackend) -> None:
    lock = Lock("it")
    assert lock.acquire()
    store.break_silently("it", owner=lock.owner or "")
    eventually(lambda: lock.lost)
    assert lock.lost_reason == "refused"


def test_g6_max_hold_ends_a_lease_whose_grants_are_shorter_than_asked(
    store: AwkwardBackend,
) -> None:
    began = clock.now()
    lock = Lock("it", ttl=2.0, max_hold=3.0)
    assert lock.acquire()
    eventually(lambda: lock.lost)
    assert lock.lost_reason == "max_hold"
    assert 3.0 - 3 * store.command_timeout <= clock.now() - began
    eventually(lambda: not store.locked("it", deadline=store.call_deadline()))


def test_an_option_that_the_store_does_not_support_is_refused(store: AwkwardBackend) -> None:
    with pytest.raises(ValueError, match="'min_hold'"):
        Lock("it", min_hold=1)


@pytest.mark.django_db(transaction=True)
def test_a_task_runs_once_per_key(store: AwkwardBackend) -> None:
    app = Celery("awkward", broker="memory://", set_as_current=False)
    ran: list[bool] = []

    def body(order_id: int) -> int:
        ran.append(store.get(f"order:{order_id}") is not None)
        return order_id

    task = app.task(
        base=LockedTask,
        lock_key="order:{order_id}",
        idempotency_key="{order_id}",
        atomic=True,
        shared=False,
    )(body)
    assert [task.apply((1,)).get() for _ in range(2)] == [1, 1]
    assert ran == [True]
    assert store.get("order:1") is None
