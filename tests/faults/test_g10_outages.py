"""G10: an acquire with patience keeps trying for a while in an outage, then raises an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest

from django_dlock import BackendUnavailable, Lock, clock, locks
from testproject.servers import RedisServer
from tests.faults.test_g10_bounded import (
    FAULTS,
    OPTIONS,
    OUTAGE_PATIENCE,
    SLACK,
    TIMEOUT,
    connect,
)
from tests.support.aliases import LONG, alias, configured
from tests.support.proxy import Proxy

Acquire: TypeAlias = Callable[..., bool]


def in_thread(lock: Lock, **options: Any) -> bool:
    return lock.acquire(**options)


def in_coroutine(lock: Lock, **options: Any) -> bool:
    return asyncio.run(lock.aacquire(**options))


@pytest.fixture(params=[in_thread, in_coroutine], ids=["thread", "coroutine"])
def acquire(request: pytest.FixtureRequest) -> Acquire:
    how: Acquire = request.param
    return how


class Tries:
    """Counts how often the backend of ``default`` was called without an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, acquire: Acquire) -> None:
        self._some = threading.Semaphore(0)
        backend = locks["default"]
        call = backend.acquire if acquire is in_thread else backend.acall

        def counting(*args: Any, **kwargs: Any) -> Any:
            with self._counted():
                return call(*args, **kwargs)

        async def counting_coroutines(*args: Any, **kwargs: Any) -> Any:
            with self._counted():
                return await call(*args, **kwargs)

        if acquire is in_thread:
            monkeypatch.setattr(backend, "acquire", counting)
        else:
            monkeypatch.setattr(backend, "acall", counting_coroutines)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except BackendUnavailable:
            self._some.release()
            raise

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._some.acquire(timeout=60)


@pytest.fixture
def server(own_redis: RedisServer) -> Iterator[RedisServer]:
    """The Redis of ``default``, with leases longer than any test.

    A busy machine may start it slowly: an outage is borne for long.
    """
    options = {"command_timeout": LONG / 6, "outage_patience": LONG / 2}
    with configured({"default": alias(own_redis.url, TTL=LONG, OPTIONS=options)}):
        yield own_redis


def test_g10_an_acquire_survives_a_restart_of_the_server(
    server: RedisServer, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lock("warm"):
        pass
    tries = Tries(monkeypatch, acquire)
    server.kill()
    lock = Lock("it", bound=False)
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(acquire, lock, timeout=60)
        tries.wait_for(3)
        server.restart()
        assert got.result(60)
    lock.release()


def test_g10_a_waiter_survives_a_restart_of_the_server(
    server: RedisServer, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, waiter = Lock("it", bound=False), Lock("it", bound=False)
    holder.acquire()
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(acquire, waiter, timeout=60)
        while not locks["default"].get("it").waiting:  # type: ignore[union-attr]
            clock.now()
        server.kill()
        server.restart()
        # The server has lost its data and with it the holder's lease.
        assert got.result(60)
    assert waiter.token is not None
    assert holder.token is not None
    assert waiter.token > holder.token
    waiter.release()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("patience", [20, -1], ids=["patient", "for ever"])
def test_g10_a_long_outage_is_reported_after_the_outage_patience(
    fault: str, patience: float, acquire: Acquire, own_redis: RedisServer, proxy: Proxy
) -> None:
    with configured({"default": alias(proxy.url, TTL=LONG, OPTIONS=OPTIONS)}):
        connect()
        FAULTS[fault](own_redis, proxy)
        started = clock.now()
        with pytest.raises(BackendUnavailable):
            acquire(Lock("it"), timeout=patience)
        assert OUTAGE_PATIENCE <= clock.now() - started < OUTAGE_PATIENCE + TIMEOUT + SLACK


def test_g10_a_single_attempt_fails_at_once(
    server: RedisServer, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = Tries(monkeypatch, acquire)
    server.kill()
    with pytest.raises(BackendUnavailable):
        acquire(Lock("it"), blocking=False)
    tries.wait_for(1)
    assert not tries._some.acquire(blocking=False)
