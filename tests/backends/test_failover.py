"""Fail-over keeps the contract in the store that is active.

It passes each call on to that store, which keeps the contract by itself; so once is enough. What
fail-over decides is in ``test_failover_switch.py``.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.backends.failover import FailoverBackend
from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.zookeeper import ZooKeeperBackend
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.testing import BackendContract
from django_dlock.testing.contract_waiting import WaitingContract
from testproject.servers import RedisServer
from tests.support.etcd import EtcdServer
from tests.support.failing_over import (
    AwaitedFailoverBackend,
    failover_backend,
    failover_options,
    put_record,
)
from tests.support.zookeeper import ZooKeeperServer

PATIENCE = 20.0
"""Seconds that a command may take: the machine may have other work."""


@pytest.fixture
def stores(
    redis_server: RedisServer, postgres_alias: str, django_db_blocker: DjangoDbBlocker
) -> Iterator[tuple[DatabaseBackend, RedisBackend]]:
    prefix = f"test-{secrets.token_hex(4)}"
    one = DatabaseBackend(
        AliasOptions(
            alias="one",
            backend="database",
            key_prefix=prefix,
            command_timeout=PATIENCE,
            options={"database": postgres_alias},
        )
    )
    two = RedisBackend(
        AliasOptions(
            alias="two",
            backend="redis",
            location=redis_server.url,
            key_prefix=prefix,
            command_timeout=PATIENCE,
        )
    )
    with django_db_blocker.unblock():
        yield one, two
        one.close()
        two.close()


@pytest.fixture
def backend(
    request: pytest.FixtureRequest,
    stores: tuple[DatabaseBackend, RedisBackend],
    postgres_alias: str,
) -> Iterator[FailoverBackend]:
    options = failover_options(
        postgres_alias, max_ttl=90.0, command_timeout=PATIENCE, view_ttl=3 * PATIENCE
    )
    # Not in the first epoch, and not in the store that the settings name first.
    put_record(options, postgres_alias, epoch=2, active="two")
    backend = failover_backend(options, *stores, kind=request.cls.kind)
    yield backend
    backend.close()


class TestFailover(BackendContract):
    kind = FailoverBackend


class TestAwaitedFailover(WaitingContract):
    kind = AwaitedFailoverBackend


@pytest.mark.parametrize("active", ["one", "two"])
def test_locks_of_zookeeper_and_etcd_are_listed_with_tokens_of_the_epoch(
    zookeeper_server: ZooKeeperServer,
    etcd_server: EtcdServer,
    postgres_alias: str,
    django_db_blocker: DjangoDbBlocker,
    active: str,
) -> None:
    """Nothing is lost on the way: what the store does not know, either."""
    prefix = f"test-{secrets.token_hex(4)}"
    common: dict[str, Any] = {
        "backend": "",
        "key_prefix": prefix,
        "command_timeout": PATIENCE,
        "ttl": 200.0,
    }
    one = ZooKeeperBackend(AliasOptions("one", location=zookeeper_server.location, **common))
    two = EtcdBackend(AliasOptions("two", location=etcd_server.url, **common))
    options = failover_options(
        postgres_alias, max_ttl=90.0, command_timeout=PATIENCE, view_ttl=3 * PATIENCE
    )
    with django_db_blocker.unblock(), contextlib.ExitStack() as stack:
        put_record(options, postgres_alias, epoch=3, active=active)
        backend = failover_backend(options, one, two)
        stack.callback(backend.close)
        assert "listing" in backend.capabilities
        request = LeaseRequest(name="a", owner=secrets.token_hex(16), ttl=30.0)
        lease = backend.acquire(request, deadline=backend.call_deadline())
        assert isinstance(lease, Lease)
        (info,) = backend.list(contains="a", sort=["-age"])
        assert (info.name, info.alias, info.token) == ("a", options.alias, lease.token)
        assert info.token >> 52 == 3
        assert info.unknown == (("renewals",) if active == "one" else ("waiting",))
        assert backend.count() == 1
        assert backend.break_silently("a", owner=lease.owner)
        assert backend.list() == []
        for store in (one, two):
            store.deregister("", deadline=store.call_deadline())
            store.close()
