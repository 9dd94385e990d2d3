"""The Redis backend fulfils the contract for coroutines, too."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.testing import BackendContract
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


class TestAwaitedRedis(BackendContract):
    pass
