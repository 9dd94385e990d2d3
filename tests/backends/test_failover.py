"""Fail-over keeps the contract in both of its stores, for threads and for coroutines."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.failover import FailoverBackend
from django_dlock.backends.redis import RedisBackend
from django_dlock.testing import BackendContract
from testproject.servers import RedisServer
from tests.support.failing_over import (
    AwaitedFailoverBackend,
    failover_backend,
    failover_options,
    put_record,
)

PATIENCE = 20.0
"""Seconds that a command may take: the machine may have other work."""


@pytest.fixture
def stores(
    redis_server: RedisServer, postgres_alias: str, django_db_blocker: DjangoDbBlocker
) -> Iterator[tuple[RedisBackend, DatabaseBackend]]:
    prefix = f"test-{secrets.token_hex(4)}"
    one = RedisBackend(
        AliasOptions(
            alias="one",
            backend="redis",
            location=redis_server.url,
            key_prefix=prefix,
            command_timeout=PATIENCE,
        )
    )
    two = DatabaseBackend(
        AliasOptions(
            alias="two",
            backend="database",
            key_prefix=prefix,
            command_timeout=PATIENCE,
            options={"database": postgres_alias},
        )
    )
    with django_db_blocker.unblock():
        yield one, two
        one.close()
        two.close()


@pytest.fixture(params=["primary", "standby"])
def backend(
    request: pytest.FixtureRequest, stores: tuple[RedisBackend, DatabaseBackend], postgres_alias
) -> Iterator[FailoverBackend]:
    options = failover_options(
        postgres_alias, max_ttl=90.0, command_timeout=PATIENCE, view_ttl=3 * PATIENCE
    )
    if request.param == "standby":
        put_record(options, postgres_alias, epoch=2, active="two")
    backend = failover_backend(options, *stores, kind=request.cls.kind)
    yield backend
    backend.close()


class TestFailover(BackendContract):
    kind = FailoverBackend


class TestAwaitedFailover(BackendContract):
    kind = AwaitedFailoverBackend
