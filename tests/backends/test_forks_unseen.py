"""A child that a server written in C has forked, so that Python has called no hooks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock import Lock
from testproject.servers import RedisServer
from tests.support.aliases import LONG, Dlocks, configured
from tests.support.etcd import EtcdServer
from tests.support.holder import in_fork, unseen_fork
from tests.support.nodes import Nodes
from tests.support.zookeeper import ZooKeeperServer

Fixture = Callable[[str], Any]


def _entry(path: str, location: object = None, **options: object) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "BACKEND": f"django_dlock.backends.{path}",
        "KEY_PREFIX": f"test-{secrets.token_hex(4)}",
        "TTL": LONG,
        "OPTIONS": {"command_timeout": 1.5, **options},
    }
    return entry if location is None else {**entry, "LOCATION": location}


def _redlock(_: Fixture) -> Iterator[Dlocks]:
    with Nodes(3) as nodes:
        entry = _entry("redlock.RedlockBackend", [one.server.url for one in nodes])
        for one in nodes:
            one.join(entry["KEY_PREFIX"])
        yield {"default": entry}


def _failover(fixture: Fixture) -> Iterator[Dlocks]:
    server: RedisServer = fixture("redis_server")
    stores = {one: _entry("redis.RedisBackend", server.url) for one in ("one", "two")}
    options = {"primary": "one", "standby": "two", "database": fixture("postgres_alias")}
    yield {"default": _entry("failover.FailoverBackend", **options), **stores}


def _on_one(path: str, name: str) -> Callable[[Fixture], Iterator[Dlocks]]:
    def entries(fixture: Fixture) -> Iterator[Dlocks]:
        server: RedisServer | EtcdServer = fixture(name)
        yield {"default": _entry(path, server.url)}

    return entries


def _zookeeper(fixture: Fixture) -> Iterator[Dlocks]:
    server: ZooKeeperServer = fixture("zookeeper_server")
    yield {"default": _entry("zookeeper.ZooKeeperBackend", server.location)}


def _database(kind: str) -> Callable[[Fixture], Iterator[Dlocks]]:
    def entries(fixture: Fixture) -> Iterator[Dlocks]:
        alias = fixture(f"{kind}_alias")
        yield {"default": _entry("database.DatabaseBackend", database=alias)}

    return entries


STORES: dict[str, Callable[[Fixture], Iterator[Dlocks]]] = {
    "redis": _on_one("redis.RedisBackend", "redis_server"),
    "redlock": _redlock,
    "postgresql": _database("postgres"),
    "mariadb": _database("mariadb"),
    "etcd": _on_one("etcd.EtcdBackend", "etcd_server"),
    "zookeeper": _zookeeper,
    "failover": _failover,
}

IN_CHILD = """
import asyncio
other = Lock("other")
other.acquire()

async def acquire():
    async with Lock("async") as lock:
        await lock.arenew()
        return [lock.held, await Lock("it").aacquire(blocking=False)]

answer = [
    lock.lost_reason, Lock("it").acquire(blocking=False), other.renew(), other.release(),
    *asyncio.run(acquire()),
]
"""


@pytest.mark.parametrize(
    "store",
    # The others make their connections as one of these does.
    [
        *("redis", "postgresql", "etcd", "zookeeper"),
        *(pytest.param(it, marks=pytest.mark.nightly) for it in ("redlock", "mariadb", "failover")),
    ],
)
def test_g8_a_child_of_an_unseen_fork_has_its_own_connections(
    store: str, request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker
) -> None:
    for dlocks in STORES[store](request.getfixturevalue):
        with django_db_blocker.unblock(), configured(dlocks):
            lock = Lock("it")
            assert lock.acquire(timeout=20)
            scope: dict[str, Any] = {"Lock": Lock, "lock": lock}
            code = f"exec({IN_CHILD!r}, globals()) or answer"
            answers = in_fork(code, scope, unseen_fork)
            assert answers == ["fork", False, None, None, True, False]
            # The answers are for this process, and not for the child.
            for n in range(5):
                with Lock(f"other:{n}"):
                    lock.renew()
            lock.release()
