"""Each command of the Redis backend arrives where a Sentinel says which server has the locks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.redis import RedisBackend
from django_dlock.testing import BackendContract
from testproject.servers import ServerNotFound
from tests.conftest import missing
from tests.support.contract_parts import each_command
from tests.support.redis_calls import backend_for, client
from tests.support.redis_sentinel import RedisSentinel


@pytest.fixture(scope="module")
def _sentinel() -> Iterator[RedisSentinel]:
    try:
        # Nothing fails here, however long the machine stalls.
        with RedisSentinel(patience=600) as sentinel:
            yield sentinel
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture
def sentinel(_sentinel: RedisSentinel) -> RedisSentinel:
    """Without locks."""
    with client(_sentinel.primary) as asking:
        asking.flushall()
    return _sentinel


@each_command
class TestRedisSentinel(BackendContract):
    @pytest.fixture
    def backend(self, sentinel: RedisSentinel) -> RedisBackend:
        return backend_for(sentinel.LOCATION, options=sentinel.options)
