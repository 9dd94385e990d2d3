"""Fail-over keeps the contract in the store that is active.

It passes each call on to that store, which keeps the contract by itself; so once is enough. What
fail-over decides is in ``test_failover_switch.py``.
"""

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
from django_dlock.testing.contract_waiting import WaitingContract
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
