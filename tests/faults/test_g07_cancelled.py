"""G7: a coroutine that is cancelled at any of its awaits leaves nothing held or renewed."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, Literal

import pytest

from django_dlock import Lock, clock, locks
from django_dlock.core.held import registry
from testproject.servers import RedisServer
from tests.support.aliases import LONG, alias, configured

Strike = Literal["cancelled", "thrown", "closed"]

STRIKES: tuple[Strike, ...] = ("cancelled", "thrown", "closed")


@pytest.fixture(autouse=True)
def lasting(own_redis: RedisServer) -> Iterator[None]:
    """Leases longer than any test: if a name is free, it was released."""
    direct = alias(own_redis.url, TTL=LONG, OPTIONS={"command_timeout": LONG / 3})
    with configured({"default": direct, "other": direct}):
        yield


class Struck:
    """Awaits a coroutine, and strikes it where it suspends for the n-th time.

    ``cancelled`` asks its task, ``thrown`` throws into it by hand while what it waits for goes on,
    and ``closed`` ends it as a loop's end does with what still waits.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], n: int, how: Strike) -> None:
        self._coroutine, self._n, self._how = coroutine, n, how
        self.suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        try:
            awaited = coroutine.send(None)
            while True:
                self.suspensions += 1
                if self.suspensions == self._n:
                    if self._how == "thrown":
                        awaited = coroutine.throw(asyncio.CancelledError())
                        continue
                    if self._how == "closed":
                        coroutine.close()
                        raise asyncio.CancelledError
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                try:
                    got = yield awaited
                except BaseException as error:
                    awaited = coroutine.throw(error)
                else:
                    awaited = coroutine.send(got)
        except StopIteration as stop:
            return stop.value


async def everywhere(
    make: Callable[[int], Awaitable[Coroutine[Any, Any, Any]]],
    how: Strike,
    afterwards: Callable[[int], Awaitable[None]],
) -> int:
    """Strike what ``make(n)`` gives at its n-th suspension, for all n; gives how many there are."""
    async with Lock("warm"):
        pass
    for n in itertools.count(1):

        async def strike(n: int = n) -> Struck:
            struck = Struck(await make(n), n, how)
            await struck
            return struck

        try:
            struck = await asyncio.create_task(strike())
        except asyncio.CancelledError:
            await afterwards(n)
        else:
            assert struck.suspensions < n
            return n - 1
    raise AssertionError


async def assert_free(name: str) -> None:
    """Nobody here holds it, and it is free as soon as the undo has come through."""
    assert name not in renewed()
    lock = Lock(name)
    assert await lock.aacquire(timeout=LONG / 2), name
    await lock.arelease()


def renewed() -> list[str]:
    """What this process would renew."""
    return [hold.name for hold in registry._leases.values() if hold.renews and not hold.ended]


@pytest.mark.parametrize("how", STRIKES)
async def test_g7_an_acquire_cancelled_at_any_await_holds_nothing(how: Strike) -> None:
    async def make(n: int) -> Coroutine[Any, Any, Any]:
        return Lock(f"it:{n}").aacquire()

    async def afterwards(n: int) -> None:
        await assert_free(f"it:{n}")

    assert await everywhere(make, how, afterwards) >= 1


@pytest.mark.parametrize("how", STRIKES)
async def test_g7_a_waiter_cancelled_at_any_await_is_forgotten(how: Strike) -> None:
    releases: list[asyncio.Task[None]] = []

    async def release_soon(holder: Lock) -> None:
        await asyncio.sleep(0.1)
        await holder.arelease()

    async def make(n: int) -> Coroutine[Any, Any, Any]:
        name = f"it:{n}"
        holder = Lock(name, bound=False, using="other")
        assert await holder.aacquire(blocking=False)
        releases.append(asyncio.create_task(release_soon(holder)))
        return Lock(name).aacquire()

    async def afterwards(n: int) -> None:
        await releases[-1]
        await assert_free(f"it:{n}")
        info = locks["default"].get(f"it:{n}")
        assert info is None or info.waiting == 0

    assert await everywhere(make, how, afterwards) >= 3
    await asyncio.gather(*releases)


@pytest.mark.parametrize("how", STRIKES)
async def test_g7_a_release_cancelled_at_any_await_renews_nothing(how: Strike) -> None:
    held: list[Lock] = []

    async def make(n: int) -> Coroutine[Any, Any, Any]:
        lock = Lock(f"it:{n}")
        held.append(lock)
        assert await lock.aacquire()
        return lock.arelease()

    async def afterwards(n: int) -> None:
        assert not held[-1].held
        await assert_free(f"it:{n}")

    assert await everywhere(make, how, afterwards) >= 1
    assert renewed() == []


@pytest.mark.parametrize("how", STRIKES)
async def test_g7_a_block_cancelled_at_any_await_leaves_the_name_free(how: Strike) -> None:
    async def block(name: str) -> None:
        async with Lock(name):
            await asyncio.sleep(0)

    async def make(n: int) -> Coroutine[Any, Any, Any]:
        return block(f"it:{n}")

    async def afterwards(n: int) -> None:
        await assert_free(f"it:{n}")

    # One each of acquire, body and release at the least.
    assert await everywhere(make, how, afterwards) >= 3
    assert renewed() == []


@pytest.mark.parametrize("how", STRIKES)
async def test_g7_a_renewal_cancelled_at_any_await_keeps_the_lock(how: Strike) -> None:
    async with Lock("it") as lock:

        async def make(n: int) -> Coroutine[Any, Any, Any]:
            return lock.arenew()

        async def afterwards(n: int) -> None:
            lock.check()

        assert await everywhere(make, how, afterwards) >= 1
        # The late replies answered nobody.
        await lock.arenew()
        assert await lock.alocked()


async def by_wait_for(lock: Lock) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(lock.aacquire(timeout=30), 0.2)


async def by_timeout(lock: Lock) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), lock:
            raise AssertionError


async def by_task_group(lock: Lock) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.2)
        raise LookupError

    with pytest.raises(Exception, match="in a TaskGroup"):
        async with asyncio.TaskGroup() as group:
            group.create_task(lock.aacquire(timeout=30))
            group.create_task(fail())


@pytest.mark.parametrize("end", [by_wait_for, by_timeout, by_task_group])
async def test_g7_what_ends_a_waiter_in_time_leaves_no_waiter(
    end: Callable[[Lock], Awaitable[None]],
) -> None:
    if sys.version_info < (3, 11) and end is not by_wait_for:
        pytest.skip("new in Python 3.11")
    async with Lock("it"):
        waiter = Lock("it", bound=False)
        await end(waiter)
        assert waiter.state == "free"
        end = clock.now() + LONG / 2
        while (info := await locks["default"].acall("get", "it")) and info.waiting:
            assert clock.now() < end, info
            await asyncio.sleep(0.01)
    await assert_free("it")
