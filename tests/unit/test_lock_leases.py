"""The held leases of a handle, and how one is unbound from its thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest

from django_dlock import AlreadyHeld, LeaseLost, Lock, LockNotAcquired, locks


@pytest.fixture(autouse=True)
def _fresh_local() -> Iterator[None]:
    locks.reset()
    yield
    assert not local().locked()


def local(**options: object) -> Lock:
    return Lock("it", using="local", wait=0, **options)  # type: ignore[arg-type]


def test_after_unbinding_the_thread_is_like_any_other() -> None:
    lock = local()
    assert lock.acquire()
    with pytest.raises(AlreadyHeld):
        Lock("it", using="local").acquire(timeout=1)
    lock.unbind()
    with pytest.raises(LockNotAcquired), local():
        pass
    assert lock.held
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    assert lock.state == "free"


def test_unbinding_a_lock_that_is_not_held_does_nothing() -> None:
    lock = local()
    lock.unbind()
    assert lock.state == "free"


def test_a_lease_shared_by_reentrant_handles_stays_with_their_thread() -> None:
    outer, inner = local(reentrant=True), local(reentrant=True)
    with outer, inner:
        inner.unbind()
        with local(reentrant=True) as third:
            assert third.token == outer.token == inner.token


def test_a_shared_handle_works_while_other_threads_start_and_end() -> None:
    shared = local()
    over = threading.Event()

    def come_and_go() -> None:
        for _ in range(3000):
            if shared.acquire(blocking=False):
                shared.release()
        over.set()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=come_and_go)
        thread.start()
        while not over.is_set():
            # None of them raises, whichever thread starts or ends in between.
            assert shared.state in ("free", "held")
        thread.join()
    finally:
        sys.setswitchinterval(usual)


async def test_g2_a_holder_that_has_lost_its_lease_does_not_release_that_of_another_coroutine() -> (
    None
):
    told, entered, left = threading.Event(), asyncio.Event(), asyncio.Event()
    shared = local(ttl=3, on_lost=lambda *_: told.set())

    async def next_holder() -> None:
        # A synchronous acquire: both coroutines hold in the name of their thread.
        with shared:
            entered.set()
            await left.wait()
            assert local().locked()

    with pytest.raises(LeaseLost, match="broken"), shared:
        locks["local"].break_("it", owner=shared.owner or "")
        assert told.wait(20)
        other = asyncio.create_task(next_holder())
        await entered.wait()
        with pytest.raises(LeaseLost, match="broken"):
            shared.check()
    left.set()
    await other


@pytest.mark.parametrize("limited", [False, True])
async def test_g2_after_a_loss_aacquire_gives_the_handle_its_new_lease(limited: bool) -> None:
    lock = local()
    assert await lock.aacquire()
    locks["local"].break_("it", owner=lock.owner or "")
    with pytest.raises(LeaseLost):
        await lock.arenew()
    # Before Python 3.12, ``wait_for`` acquires in a task of its own.
    assert await (asyncio.wait_for(lock.aacquire(), 20) if limited else lock.aacquire())
    lock.check()
    await lock.arelease()
