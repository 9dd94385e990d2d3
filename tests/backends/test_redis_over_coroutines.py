"""How a Redis is reached and what it may lose, once more for coroutines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock.backends.base import AliasOptions
from tests.awaited import AwaitedRedisBackend
from tests.backends import test_redis_connections, test_redis_faults
from tests.backends.test_redis_connections import *  # noqa: F403
from tests.backends.test_redis_faults import *  # noqa: F403


@pytest.fixture
def way() -> None:
    """Once: neither of the ways of threads."""


@pytest.fixture(autouse=True)
def awaited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[AwaitedRedisBackend] = []

    def backend_for(location: str | None = None, **kwargs: Any) -> AwaitedRedisBackend:
        options = AliasOptions(alias="redis", backend="redis", location=location, **kwargs)
        backend = AwaitedRedisBackend(options)
        made.append(backend)
        return backend

    for module in (test_redis_connections, test_redis_faults):
        monkeypatch.setattr(module, "backend_for", backend_for)
    yield
    for backend in made:
        backend.close()
