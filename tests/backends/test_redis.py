"""The Redis backend fulfils the contract."""

from __future__ import annotations

import pytest

from django_dlock.backends.redis import RedisBackend
from django_dlock.testing import BackendContract

pytestmark = pytest.mark.quick


@pytest.fixture
def backend(redis_backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> RedisBackend:
    return redis_backend


class TestRedis(BackendContract):
    pass
