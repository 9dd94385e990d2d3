"""A handle that is acquired again after it lost its lease."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock import LeaseLost, Lock, NotHeld, clock, locks
from tests.support.leases import leases_in


@pytest.fixture(autouse=True)
def _fresh_local() -> Iterator[None]:
    locks.reset()
    yield
    assert not local().locked(), "a lease is left"


def local(**options: Any) -> Lock:
    return Lock("it", using="local", wait=0, **options)


def lose(lock: Lock) -> None:
    """Somebody breaks it, and the handle notices."""
    assert locks["local"].break_("it", owner=lock.owner or "")
    with pytest.raises(LeaseLost):
        lock.renew()
    assert lock.lost


@pytest.mark.parametrize("bound", [True, False])
def test_g2_a_lock_that_is_acquired_again_after_a_loss_is_held(bound: bool) -> None:
    lock = local(bound=bound)
    assert lock.acquire()
    first = lock.token
    lose(lock)
    assert lock.acquire(blocking=False)
    assert (lock.state, lock.lost_reason) == ("held", None)
    lock.check()
    lock.renew()
    assert (lock.token or 0) > (first or 0)
    lock.release()
    assert lock.state == "free"
    # The lost hold ended when it was acquired again.
    with pytest.raises(NotHeld):
        lock.release()


@pytest.mark.parametrize("bound", [True, False])
async def test_g2_a_lock_that_is_awaited_again_after_a_loss_is_held(bound: bool) -> None:
    lock = local(bound=bound)
    for _ in range(2):
        assert await lock.aacquire()
        lose(lock)
    assert await lock.aacquire()
    lock.check()
    await lock.arelease()
    assert lock.state == "free"


@pytest.mark.parametrize("bound", [True, False])
def test_g2_a_leader_leads_again_after_each_loss(bound: bool) -> None:
    lock = local(bound=bound)
    for _ in range(3):
        assert lock.held or lock.acquire(blocking=False)
        assert lock.held
        lose(lock)
    with pytest.raises(LeaseLost):
        lock.release()


@pytest.mark.parametrize("options", [{"max_hold": 50}, {"renew": False, "ttl": 20}])
def test_g2_a_lock_that_ended_by_itself_is_acquired_again(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    now = [clock.now()]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    lock = local(**options)
    for _ in range(3):
        assert lock.acquire()
        assert lock.held
        now[0] += 60
        assert not lock.held
    assert len(leases_in("local")) == 0
    with pytest.raises(LeaseLost):
        lock.release()
    with pytest.raises(NotHeld):
        lock.release()


# -- blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [True, False])
def test_g2_a_block_inside_a_lost_one_holds_and_both_tell_the_truth(bound: bool) -> None:
    lock, done = local(bound=bound), []
    with pytest.raises(LeaseLost, match="broken"), lock:
        lose(lock)
        with lock:
            lock.check()
            done.append(lock.held)
        assert lock.state == "free"
        assert not lock.locked()
    assert done == [True]
    assert lock.lost_reason == "broken"


@pytest.mark.parametrize("bound", [True, False])
async def test_g2_an_async_block_inside_a_lost_one_holds(bound: bool) -> None:
    lock, done = local(bound=bound), []
    with pytest.raises(LeaseLost, match="broken"):
        async with lock:
            lose(lock)
            async with lock:
                lock.check()
                done.append(lock.held)
            assert not await lock.alocked()
    assert done == [True]


@pytest.mark.parametrize("released", [True, False])
def test_g2_a_block_that_lost_its_lease_raises_although_it_acquired_another(
    released: bool,
) -> None:
    lock = local()
    with pytest.raises(LeaseLost, match="broken"), lock:
        lose(lock)
        assert lock.acquire()
        lock.check()
        if released:
            lock.release()
    # As with every lock, the end of the block releases what was acquired in it.
    assert not lock.locked()


async def test_g2_an_async_block_that_lost_its_lease_raises_although_it_acquired_another() -> None:
    lock = local()
    with pytest.raises(LeaseLost, match="broken"):
        async with lock:
            lose(lock)
            assert await lock.aacquire()
            lock.check()
    assert not await lock.alocked()


@pytest.mark.parametrize("released", [True, False])
async def test_g2_a_lock_that_another_task_acquired_again_for_its_caller_is_held(
    released: bool,
) -> None:
    lock = local()
    with pytest.raises(LeaseLost, match="broken"):
        async with lock:
            lose(lock)
            # As ``asyncio.wait_for`` does before Python 3.12.
            assert await asyncio.create_task(lock.aacquire())
            lock.check()
            if released:
                await lock.arelease()
                assert lock.state == "free"
    assert not await lock.alocked()


def test_an_error_of_a_block_that_acquired_again_propagates() -> None:
    lock = local()
    with pytest.raises(KeyError), lock:
        lose(lock)
        assert lock.acquire()
        raise KeyError
    assert not lock.locked()


def test_g2_both_reentrant_blocks_tell_the_loss() -> None:
    lock, told = local(reentrant=True), []
    with pytest.raises(LeaseLost, match="broken"), lock:
        try:
            with lock:
                lose(lock)
        except LeaseLost as error:
            told.append(error.reason)
    assert told == ["broken"]
    assert lock.lost


# -- others are not affected -------------------------------------------------------------------


def test_g2_a_thread_that_lost_its_lease_is_told_while_another_acquires_again() -> None:
    shared = local()
    lost, again = threading.Event(), threading.Event()
    told: list[str] = []

    def first() -> None:
        try:
            with shared:
                lose(shared)
                lost.set()
                again.wait(20)
                told.append(shared.state)
        except LeaseLost as error:
            told.append(error.reason)

    thread = threading.Thread(target=first)
    thread.start()
    assert lost.wait(20)
    with shared:
        lose(shared)
        assert shared.acquire()
        again.set()
        thread.join()
        assert shared.held
        with pytest.raises(LeaseLost):
            shared.__exit__(None, None, None)
    assert told == ["lost", "broken"]


async def test_g2_a_coroutine_that_lost_its_lease_is_told_while_another_acquires() -> None:
    shared, told = local(), []
    lost, again = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        try:
            async with shared:
                lose(shared)
                lost.set()
                await again.wait()
                told.append(shared.state)
        except LeaseLost as error:
            told.append(error.reason)

    task = asyncio.create_task(first())
    await lost.wait()
    async with shared:
        again.set()
        await task
        assert shared.held
    assert told == ["lost", "broken"]
