"""The Redis backend fulfils the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.redis import RedisBackend
from django_dlock.testing import BackendContract
from testproject.servers import RedisServer
from tests.support.declared_keys import all_keys_declared

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module", autouse=True)
def declared_keys(redis_server: RedisServer) -> Iterator[None]:
    """At the end: no script has touched a key that it had not declared."""
    with all_keys_declared(redis_server):
        yield


@pytest.fixture
def backend(redis_backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> RedisBackend:
    return redis_backend


class TestRedis(BackendContract):
    pass
