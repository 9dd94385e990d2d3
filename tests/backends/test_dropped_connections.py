"""Connections that a NAT or a moved address drops in silence: nobody tries them one by one.

A proxy forgets its connections: nothing arrives on them any more, and new ones work. The proxy
counts the forgotten connections that were tried.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections
from pytest_django import DjangoDbBlocker

from django_dlock import Lock, signals
from django_dlock.backends.shared.pool import MOST_IDLE
from django_dlock.testing import FakeClock
from tests.support import databases
from tests.support.aliases import LONG, Dlocks, configured
from tests.support.nodes import Node
from tests.support.proxy import Protocol, Proxy

IDLE = 12
TIMEOUT = 1.5
"""Of a command; a new connection takes a part of it."""
PATH = "django_dlock.backends"
STORES = ["redis", "redlock", "postgres", "mariadb", "etcd", "zookeeper", "failover"]
Site = list[Proxy]


def _entry(kind: str, location: object = None, **options: Any) -> dict[str, Any]:
    patience = {"command_timeout": TIMEOUT, "outage_patience": 6 * TIMEOUT}
    entry = {"BACKEND": f"{PATH}.{kind}", "TTL": LONG, "OPTIONS": {**patience, **options}}
    entry["KEY_PREFIX"] = f"test-{secrets.token_hex(4)}"
    return entry if location is None else {**entry, "LOCATION": location}


def _through(stack: ExitStack, port: int, speaks: Protocol = "redis") -> Proxy:
    return stack.enter_context(Proxy("127.0.0.1", port, speaks=speaks))


def _redis(stack: ExitStack, request: pytest.FixtureRequest) -> tuple[Dlocks, Site]:
    proxy = _through(stack, request.getfixturevalue("redis_server").port)
    return {"default": _entry("redis.RedisBackend", proxy.url)}, [proxy]


def _redlock(stack: ExitStack, request: pytest.FixtureRequest) -> tuple[Dlocks, Site]:
    nodes = [Node() for _ in range(3)]
    entry = _entry("redlock.RedlockBackend", [one.proxy.url for one in nodes])
    for node in nodes:
        stack.callback(node.stop)
        node.join(entry["KEY_PREFIX"])
    return {"default": entry}, [one.proxy for one in nodes]


def _failover(stack: ExitStack, request: pytest.FixtureRequest) -> tuple[Dlocks, Site]:
    dlocks, proxies = _redis(stack, request)
    dlocks["one"] = dlocks.pop("default")
    dlocks["two"] = _entry("redis.RedisBackend", request.getfixturevalue("redis_server").url)
    alias = request.getfixturevalue("postgres_alias")
    options = {"primary": "one", "standby": "two", "database": alias}
    dlocks["default"] = _entry("failover.FailoverBackend", **options)
    return dlocks, proxies


def _database(stack: ExitStack, request: pytest.FixtureRequest, kind: str) -> tuple[Dlocks, Site]:
    settings = connections.settings[request.getfixturevalue(f"{kind}_alias")]
    port = urlsplit(request.getfixturevalue(f"{kind}_url")).port or 0
    proxy = _through(stack, port, "postgres" if kind == "postgres" else "amqp")
    through = {**settings, "HOST": "127.0.0.1", "PORT": str(proxy.port)}
    stack.enter_context(databases.added("through", through))
    options = {"database": "through", "connections": IDLE + 4}
    return {"default": _entry("database.DatabaseBackend", **options)}, [proxy]


def _etcd(stack: ExitStack, request: pytest.FixtureRequest) -> tuple[Dlocks, Site]:
    proxy = _through(stack, request.getfixturevalue("etcd_server").port, "etcd")
    return {"default": _entry("etcd.EtcdBackend", f"http://127.0.0.1:{proxy.port}")}, [proxy]


def _zookeeper(stack: ExitStack, request: pytest.FixtureRequest) -> tuple[Dlocks, Site]:
    server = request.getfixturevalue("zookeeper_server")
    proxy = _through(stack, server.port, "zookeeper")
    return {"default": _entry("zookeeper.ZooKeeperBackend", f"127.0.0.1:{proxy.port}")}, [proxy]


MAKE: dict[str, Callable[..., tuple[Dlocks, Site]]] = {
    "redis": _redis,
    "redlock": _redlock,
    "postgres": lambda *args: _database(*args, "postgres"),
    "mariadb": lambda *args: _database(*args, "mariadb"),
    "etcd": _etcd,
    "zookeeper": _zookeeper,
    "failover": _failover,
}


@contextmanager
def site_of(
    kind: str, request: pytest.FixtureRequest, blocker: DjangoDbBlocker, **options: Any
) -> Iterator[Site]:
    """Configures the default alias for a store, each server of it behind a proxy."""
    with ExitStack() as stack, blocker.unblock():
        dlocks, proxies = MAKE[kind](stack, request)
        dlocks["default"]["OPTIONS"].update(options)
        stack.enter_context(configured(dlocks))
        yield proxies


@pytest.fixture(params=STORES)
def site(request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker) -> Iterator[Site]:
    with site_of(request.param, request, django_db_blocker) as proxies:
        yield proxies


@pytest.fixture
def redis_site(
    request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker
) -> Iterator[Proxy]:
    with site_of("redis", request, django_db_blocker) as (proxy,):
        yield proxy


def use_many(site: Site, count: int = IDLE) -> None:
    """Make the process use as many connections at the same time as it may."""
    for proxy in site:
        proxy.delay = 0.05
    together = threading.Barrier(count)

    def cycle(number: int) -> None:
        together.wait()
        with Lock(f"warm:{number}"):
            pass

    threads = [threading.Thread(target=cycle, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for proxy in site:
        proxy.delay = 0.0


def tried(site: Site) -> int:
    """How many forgotten connections of one server were tried."""
    return max(len(proxy.tried) for proxy in site)


def established(port: int) -> int:
    """How many connections to a port of this machine the clients have not closed."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[2].split(":")[1], 16) == port and row[3] == "01" for row in rows)


@pytest.mark.parametrize("waits", ["thread", pytest.param("coroutine", marks=pytest.mark.nightly)])
def test_g10_an_acquire_tries_one_dropped_connection_and_then_a_new_one(
    site: Site, waits: str
) -> None:
    use_many(site)
    for proxy in site:
        proxy.forget()
    lock = Lock("it", bound=False)
    if waits == "thread":
        assert lock.acquire(timeout=10)
    else:
        assert asyncio.run(lock.aacquire(timeout=10))
    assert tried(site) <= 1
    lock.release()


def test_g6_a_renewal_tries_one_dropped_connection_and_then_a_new_one(site: Site) -> None:
    use_many(site)
    renewed = threading.Event()

    def tell(**_: Any) -> None:
        renewed.set()

    with Lock("it") as lock:
        for proxy in site:
            proxy.forget()
        signals.renewed.connect(tell)
        try:
            # Renewed at once instead of after a third of the TTL.
            lock._backend.report_doubt()
            assert renewed.wait(10 * TIMEOUT)
        finally:
            signals.renewed.disconnect(tell)
        assert tried(site) <= 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs a packet filter")
def test_a_single_try_survives_a_router_that_confirms_nothing(redis_site: Proxy) -> None:
    use_many([redis_site])
    redis_site.forget(acknowledges=False)
    # The system notices by itself, within the time of one command.
    assert Lock("it").acquire(blocking=False)
    # The other connections are as old.
    assert established(redis_site.port) == 1


def test_a_pool_closes_what_no_call_has_used_for_a_minute(redis_site: Proxy) -> None:
    with FakeClock() as clock:
        use_many([redis_site])
        # The last connection is in use all the time.
        clock.advance(MOST_IDLE / 2)
        with Lock("it"):
            clock.advance(MOST_IDLE / 2 + 1)
        with Lock("it"):
            redis_site.wait_until(lambda proxy: proxy.open == 1)
