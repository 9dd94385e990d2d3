"""Coroutines wait for a lock on Redis as the contract says."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.testing.contract_waiting import WaitingContract
from testproject.servers import RedisServer
from tests.support.awaited import AwaitedRedisBackend


@pytest.fixture
def backend(redis_server: RedisServer) -> Iterator[AwaitedRedisBackend]:
    prefix = f"test-{secrets.token_hex(4)}"
    options = AliasOptions(
        "redis",
        "redis",
        location=redis_server.url,
        key_prefix=prefix,
        # The machine may have other work.
        command_timeout=20.0,
    )
    backend = AwaitedRedisBackend(options)
    yield backend
    backend.close()


class TestAwaitedRedis(WaitingContract):
    pass
