"""The Redis backend keeps the contract for coroutines, too."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.testing import BackendContract
from testproject.servers import RedisServer
from tests.awaited import AwaitedRedisBackend


@pytest.fixture
def backend(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AwaitedRedisBackend]:
    # A waiter that asks again by itself would hide a wake-up that was lost.
    monkeypatch.setattr("django_dlock.backends.redis_mailbox.LONGEST_BLOCK", 3600.0)
    prefix = f"test-{secrets.token_hex(4)}"
    options = AliasOptions("redis", "redis", location=redis_server.url, key_prefix=prefix)
    backend = AwaitedRedisBackend(options)
    yield backend
    backend.close()


class TestAwaitedRedis(BackendContract):
    pass
