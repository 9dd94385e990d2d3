"""A process's own queue for connections is a wait, and no outage of the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock import AcquireTimeout, BackendUnavailable, Lock, LockNotAcquired, locks
from tests.backends.test_dropped_connections import Site, site_of
from tests.support.points import at
from tests.support.proxy import Proxy
from tests.support.redis_calls import pool_of

CALLERS = 60
FEW = {
    "command_timeout": 1.5,
    "outage_patience": 0.2,
}


@pytest.fixture(params=["redis", "postgres", "etcd"])
def slow_site(request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker) -> Iterator[Site]:
    few = {"redis": {"max_connections": 3}, "postgres": {"connections": 3}, "etcd": {}}
    options = {**FEW, **few[request.param]}
    with site_of(request.param, request, django_db_blocker, **options) as site:
        with Lock("warm"):
            pass
        for proxy in site:
            proxy.delay = 0.08
        yield site
        for proxy in site:
            proxy.delay = 0.0


@pytest.mark.usefixtures("slow_site")
def test_coroutines_wait_for_a_connection_as_long_as_for_the_lock() -> None:
    async def cycle(number: int) -> None:
        async with Lock(f"it:{number}", wait=None):
            pass

    async def main() -> list[Any]:
        return await asyncio.gather(*map(cycle, range(CALLERS)), return_exceptions=True)

    assert asyncio.run(main()) == [None] * CALLERS


@pytest.mark.usefixtures("slow_site")
def test_threads_wait_for_a_connection_as_long_as_for_the_lock() -> None:
    errors: list[BaseException] = []

    def cycle(number: int) -> None:
        try:
            with Lock(f"it:{number}", wait=None):
                pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=cycle, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.fixture
def full_pool(
    request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker
) -> Iterator[Proxy]:
    options = {**FEW, "max_connections": 3}
    with site_of("redis", request, django_db_blocker, **options) as (proxy,):
        pool = pool_of(locks["default"])  # type: ignore[arg-type]
        with Lock("held") as lock:
            slots = [pool.take(0, float("inf")) for _ in range(2)]
            request.node.lock = lock
            yield proxy
            for slot in slots:
                slot.release()


def test_one_try_is_no_outage_while_the_store_answers_others(
    full_pool: Proxy, request: pytest.FixtureRequest
) -> None:
    def renew(_: Any) -> None:
        request.node.lock.renew()

    with at("pool.waiting", renew, urgency=0):
        assert Lock("it").acquire(blocking=False) is False
        with pytest.raises(LockNotAcquired, match="all connections of this process") as caught:
            Lock("it", wait=0).__enter__()
        assert not isinstance(caught.value, AcquireTimeout)
        with pytest.raises(AcquireTimeout, match="all connections of this process"):
            Lock("it", wait=0.1).__enter__()


@pytest.mark.usefixtures("full_pool")
def test_a_queue_in_which_nobody_is_answered_is_an_outage() -> None:
    with pytest.raises(BackendUnavailable, match="no call that has one was answered") as caught:
        Lock("it").acquire(blocking=False)
    assert caught.value.unsent
