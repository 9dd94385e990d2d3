"""G7: a coroutine that is cancelled at any of its awaits leaves nothing held or renewed."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, Literal

import pytest

from django_dlock import Lock, clock, locks
from testproject.servers import RedisServer
from tests.support.aliases import LONG, alias, configured
from tests.support.leases import leases_in

Interruption = Literal["cancelled", "thrown", "closed"]

INTERRUPTIONS: tuple[Interruption, ...] = ("cancelled", "thrown", "closed")


@pytest.fixture(autouse=True)
def lasting(own_redis: RedisServer) -> Iterator[None]:
    """Leases longer than any test: a free name has been released."""
    direct = alias(own_redis.url, TTL=LONG, OPTIONS={"command_timeout": LONG / 3})
    with configured({"default": direct, "other": direct}):
        yield


class InterruptedAwait:
    """Awaits a coroutine, and interrupts it where it suspends for the n-th time.

    ``cancelled`` cancels its task. ``thrown`` throws into the coroutine directly, while the
    operation that it awaits goes on. ``closed`` closes it, as the end of an event loop does.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], n: int, how: Interruption) -> None:
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
    how: Interruption,
    afterwards: Callable[[int], Awaitable[None]],
) -> int:
    """Interrupt what ``make(n)`` returns at its n-th suspension, for all n; return the count."""
    async with Lock("warm"):
        pass
    for n in itertools.count(1):

        async def interrupt(n: int = n) -> InterruptedAwait:
            interrupted = InterruptedAwait(await make(n), n, how)
            await interrupted
            return interrupted

        try:
            interrupted = await asyncio.create_task(interrupt())
        except asyncio.CancelledError:
            await afterwards(n)
        else:
            assert interrupted.suspensions < n
            return n - 1
    raise AssertionError


async def assert_free(name: str) -> None:
    """This process does not hold it, and it is free once the cancellation has been sent."""
    assert name not in renewed()
    lock = Lock(name)
    assert await lock.aacquire(timeout=LONG / 2), name
    await lock.arelease()


async def waiting(name: str) -> int:
    """How many are queued."""
    backend = locks["other"]
    info = await backend.acall(backend.get, name)
    return 0 if info is None else info.waiting


async def assert_nobody_waits(name: str) -> None:
    """The queue is empty once the cancellation has been sent."""
    end = clock.now() + LONG / 2
    while count := await waiting(name):
        assert clock.now() < end, count
        await asyncio.sleep(0.01)


def renewed() -> list[str]:
    """What this process would renew."""
    return [hold.name for hold in leases_in() if hold.renews and not hold.ended]


@pytest.mark.parametrize("how", INTERRUPTIONS)
async def test_g7_an_acquire_cancelled_at_any_await_holds_nothing(how: Interruption) -> None:
    async def make(n: int) -> Coroutine[Any, Any, Any]:
        return Lock(f"it:{n}").aacquire()

    async def afterwards(n: int) -> None:
        await assert_free(f"it:{n}")

    assert await everywhere(make, how, afterwards) >= 1


@pytest.mark.parametrize("how", INTERRUPTIONS)
async def test_g7_a_waiter_cancelled_at_any_await_leaves_the_queue(how: Interruption) -> None:
    releases: list[asyncio.Task[None]] = []
    interrupted = asyncio.Event()

    async def release_soon(holder: Lock) -> None:
        # Not before the other waits, however long it takes to ask.
        while not interrupted.is_set():
            if await waiting(holder.name):
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await holder.arelease()

    async def make(n: int) -> Coroutine[Any, Any, Any]:
        name = f"it:{n}"
        holder = Lock(name, bound=False, using="other")
        assert await holder.aacquire(blocking=False)
        interrupted.clear()
        releases.append(asyncio.create_task(release_soon(holder)))
        return Lock(name).aacquire()

    async def afterwards(n: int) -> None:
        interrupted.set()
        await releases[-1]
        await assert_free(f"it:{n}")
        await assert_nobody_waits(f"it:{n}")

    assert await everywhere(make, how, afterwards) >= 3
    await asyncio.gather(*releases)


@pytest.mark.parametrize("how", INTERRUPTIONS)
async def test_g7_a_release_cancelled_at_any_await_renews_nothing(how: Interruption) -> None:
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


@pytest.mark.parametrize("how", INTERRUPTIONS)
async def test_g7_a_block_cancelled_at_any_await_leaves_the_name_free(how: Interruption) -> None:
    async def block(name: str) -> None:
        async with Lock(name):
            await asyncio.sleep(0)

    async def make(n: int) -> Coroutine[Any, Any, Any]:
        return block(f"it:{n}")

    async def afterwards(n: int) -> None:
        await assert_free(f"it:{n}")

    # At least one each in acquire, body and release.
    assert await everywhere(make, how, afterwards) >= 3
    assert renewed() == []


@pytest.mark.parametrize("how", INTERRUPTIONS)
async def test_g7_a_renewal_cancelled_at_any_await_keeps_the_lock(how: Interruption) -> None:
    async with Lock("it") as lock:

        async def make(n: int) -> Coroutine[Any, Any, Any]:
            return lock.arenew()

        async def afterwards(n: int) -> None:
            lock.check()

        assert await everywhere(make, how, afterwards) >= 1
        # The late replies answered no other call.
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
async def test_g7_a_waiter_ended_by_a_timeout_leaves_the_queue(
    end: Callable[[Lock], Awaitable[None]],
) -> None:
    if sys.version_info < (3, 11) and end is not by_wait_for:
        pytest.skip("new in Python 3.11")
    async with Lock("it"):
        waiter = Lock("it", bound=False)
        await end(waiter)
        assert waiter.state == "free"
        await assert_nobody_waits("it")
    await assert_free("it")
