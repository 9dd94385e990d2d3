"""A coroutine whose event loop is closed while it waits gets no lease that nobody would use."""

from __future__ import annotations

import asyncio
import gc
import secrets
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock import Lock, locks, signals
from tests.support.aliases import LONG, configured
from tests.support.databases import until

# The garbage of other tests has open connections, which are no subject here.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

STORES = {
    "redis": ("redis.RedisBackend", "redis_server"),
    "etcd": ("etcd.EtcdBackend", "etcd_server"),
    "zookeeper": ("zookeeper.ZooKeeperBackend", "zookeeper_server"),
    "postgres": ("database.DatabaseBackend", "postgres_alias"),
    "mariadb": ("database.DatabaseBackend", "mariadb_alias"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    backend, fixture = STORES[request.param]
    server = request.getfixturevalue(fixture)
    entry: dict[str, Any] = {
        "BACKEND": f"django_dlock.backends.{backend}",
        "KEY_PREFIX": f"test-{secrets.token_hex(4)}",
        "TTL": LONG,
        "OPTIONS": {"command_timeout": LONG / 6},
    }
    if fixture.endswith("_alias"):
        entry["OPTIONS"]["database"] = server
    else:
        entry["LOCATION"] = getattr(server, "location", None) or server.url
    with configured({"default": entry}):
        yield request.param
        locks["default"].close()


async def _wait_for(lock: Lock) -> asyncio.Task[bool]:
    """Let a coroutine wait for the lock, until it has nothing to do any more."""
    loop, met = asyncio.get_running_loop(), asyncio.Event()

    def tell(**_: Any) -> None:
        loop.call_soon_threadsafe(met.set)

    signals.contended.connect(tell)
    try:
        task = asyncio.create_task(lock.aacquire(timeout=-1))
        await met.wait()
    finally:
        signals.contended.disconnect(tell)
    # Some stores let it ask a second time before it sleeps.
    await asyncio.sleep(0.2)
    assert not task.done()
    return task


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("collected", [False, True])
def test_g4_a_waiter_whose_loop_was_closed_gets_nothing(store: str, collected: bool) -> None:
    # Nothing wakes the waiters of MariaDB, so their place in the queue ends with its time.
    collected = collected or store == "mariadb"
    holder, waiter = Lock("it", bound=False), Lock("it")
    assert holder.acquire()
    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(_wait_for(waiter))
    loop.close()
    gone = weakref.ref(task)
    # Otherwise asyncio logs an error when it is collected.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    if collected:
        del task, loop
        # A call that is under way keeps it alive until it is answered.
        until(lambda: gc.collect() >= 0 and gone() is None)
    holder.release()
    assert Lock("it").acquire(timeout=LONG / 4)
    info = locks["default"].get("it")
    assert info is not None
    assert info.waiting == 0
