"""Who holds a lock after a bare ``aacquire()``, as ``docs/howto/async.md`` says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from django_dlock import AlreadyHeld, Lock


def local(**options: Any) -> Lock:
    return Lock("it", using="local", **options)


async def in_another_task(run: Callable[[], Awaitable[Any]]) -> Any:
    async def task() -> Any:
        return await run()

    return await asyncio.create_task(task())


async def test_the_lock_is_held_after_its_task_has_ended() -> None:
    lock = local()
    assert await in_another_task(lock.aacquire)
    assert lock.held
    await in_another_task(lock.arelease)
    assert lock.state == "free"
    assert not await lock.alocked()


async def test_all_tasks_use_one_hold_of_one_object() -> None:
    lock = local()
    assert await lock.aacquire()
    token = lock.token
    with pytest.raises(AlreadyHeld):
        await in_another_task(lock.aacquire)
    assert not await in_another_task(lambda: lock.aacquire(blocking=False))
    assert (lock.token, lock.held) == (token, True)
    await in_another_task(lock.arelease)
    assert not await lock.alocked()


@pytest.mark.parametrize("reentrant", [False, True])
async def test_two_objects_exclude_each_other_in_one_task(reentrant: bool) -> None:
    first, second = local(reentrant=reentrant), local(reentrant=reentrant)
    assert await first.aacquire()
    # It waits, and does not raise ``AlreadyHeld``.
    assert not await second.aacquire(timeout=0)
    waits = asyncio.create_task(second.aacquire(timeout=-1))
    await asyncio.sleep(0)
    await first.arelease()
    assert await waits
    await second.arelease()


async def entered(lock: Lock) -> None:
    with lock:
        pass


async def entered_async(lock: Lock) -> None:
    async with lock:
        pass


async def acquired(lock: Lock) -> None:
    lock.acquire()
    lock.release()


@pytest.mark.parametrize("acquire", [entered, entered_async, acquired])
async def test_its_task_does_not_wait_for_itself(
    acquire: Callable[[Lock], Awaitable[None]],
) -> None:
    first = local()
    assert await first.aacquire()
    with pytest.raises(AlreadyHeld):
        await acquire(local())
    await first.arelease()
    first = local(reentrant=True)
    assert await first.aacquire()
    await acquire(local(reentrant=True))
    assert first.held
    await first.arelease()
    assert not await first.alocked()
