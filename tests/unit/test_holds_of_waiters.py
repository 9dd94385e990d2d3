"""A request that may wait says which leases its caller holds, so that operators see chains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from django_dlock import Lock, locks
from django_dlock.core.held_lease import registry
from django_dlock.core.registry import MOST_TOLD
from django_dlock.lease import HOLDING, Waiter
from django_dlock.testing import local_locks


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    # Without the leases that earlier tests have left to their TTL.
    earlier = registry.take_all()
    with local_locks():
        yield
    for held in earlier:
        registry.add(held)


def holding(name: str) -> tuple[str, ...]:
    """What the holder of the name held when it asked."""
    info = locks["default"].get(name)
    assert info is not None
    told = info.metadata.get(HOLDING, "")
    return tuple(told.split())


def part(lock: Lock) -> str:
    assert lock.owner
    return lock.owner[:16]


def test_a_holder_of_nothing_says_nothing() -> None:
    with Lock("a", metadata={"note": 1}):
        info = locks["default"].get("a")
        assert info is not None
        assert info.metadata == {"note": 1}


def test_a_thread_says_what_it_holds() -> None:
    with Lock("a") as a, Lock("b", metadata={"note": "ü"}) as b, Lock("c") as c:
        assert holding("a") == ()
        assert holding("b") == (part(a),)
        assert set(holding("c")) == {part(a), part(b)}
        info = locks["default"].get("b")
        assert info is not None
        assert info.metadata["note"] == "ü"
        b.release()
        with Lock("d"):
            assert set(holding("d")) == {part(a), part(c)}
        b.acquire()
    with Lock("e"):
        assert holding("e") == ()


def test_a_waiter_says_what_it_holds() -> None:
    outer, done = Lock("a"), threading.Event()

    def work() -> None:
        with outer, Lock("b", wait=None):
            done.set()

    with Lock("b"):
        thread = threading.Thread(target=work)
        thread.start()
        waiters: list[Waiter] = []
        while not waiters:
            waiters = locks["default"].waiters("b")
        assert waiters[0].holding == (part(outer),)
    assert done.wait(20)
    thread.join(20)


def test_a_caller_that_tries_only_once_says_nothing() -> None:
    with Lock("a"), Lock("b", wait=0):
        assert holding("b") == ()


def test_another_threads_leases_are_not_named() -> None:
    def work() -> None:
        with Lock("b"):
            found.append(holding("b"))

    found: list[tuple[str, ...]] = []
    with Lock("a"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    assert found == [()]


def test_a_coroutine_says_what_its_own_task_holds() -> None:
    async def other(entered: asyncio.Event, leave: asyncio.Event) -> None:
        async with Lock("other"):
            entered.set()
            await leave.wait()

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(other(entered, leave))
        await entered.wait()
        by_handle = Lock("a")
        await by_handle.aacquire()
        async with Lock("b") as b, Lock("c"):
            assert holding("b") == (part(by_handle),)
            assert set(holding("c")) == {part(by_handle), part(b)}
        await by_handle.arelease()
        leave.set()
        await task

    asyncio.run(main())


def test_only_the_latest_of_many_leases_are_named() -> None:
    held = [Lock(f"n{number}") for number in range(MOST_TOLD + 4)]
    for lock in held:
        lock.acquire()
    with Lock("last"):
        assert set(holding("last")) == {part(lock) for lock in held[4:]}
    for lock in held:
        lock.release()


def test_holders_without_leases_are_not_kept() -> None:
    def work() -> None:
        with Lock(f"of {threading.get_ident()}"):
            pass

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    assert not registry
