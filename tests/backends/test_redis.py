"""The Redis backend keeps the contract."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from django_dlock.backends.redis import RedisBackend
from django_dlock.testing import BackendContract
from testproject.servers import RedisServer

from .tools import backend_for


@pytest.fixture
def backend(redis_backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> RedisBackend:
    # A waiter that asks again by itself would hide a wake-up that was lost.
    monkeypatch.setattr("django_dlock.backends.redis_mailbox.LONGEST_BLOCK", 3600.0)
    return redis_backend


class TestRedis(BackendContract):
    pass


class TestRedisByItsClient(BackendContract):
    """The same through redis-py's client."""

    @pytest.fixture
    def backend(
        self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[RedisBackend]:
        monkeypatch.setattr("django_dlock.backends.redis_mailbox.LONGEST_BLOCK", 3600.0)
        prefix = f"test-{secrets.token_hex(4)}"
        backend = backend_for(redis_server.url, key_prefix=prefix, options={"client": "redis-py"})
        yield backend
        backend.close()
