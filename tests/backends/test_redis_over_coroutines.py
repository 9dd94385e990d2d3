"""How a Redis is reached and what it may lose, once more for coroutines."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_dlock import clock
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.redis import RedisBackend
from django_dlock.exceptions import BackendUnavailable
from testproject.servers import RedisServer
from tests.awaited import AwaitedRedisBackend
from tests.backends import test_redis_connections, test_redis_faults
from tests.backends.test_redis_connections import *  # noqa: F403
from tests.backends.test_redis_faults import *  # noqa: F403
from tests.proxy import Proxy


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another one besides those of threads, each of which has databases of its own."""
    ways = (*test_redis_connections.CLIENTS, "awaited")
    monkeypatch.setattr(test_redis_connections, "CLIENTS", ways)
    return "awaited"


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


def test_a_tls_connection_behind_a_black_hole_is_closed_at_once(
    tls_redis: RedisServer, certificates: tuple[Path, Path, Path]
) -> None:
    async def main() -> None:
        await backend.acall("locked", "it", deadline=clock.now() + 5)
        proxy.black_hole()
        with pytest.raises(BackendUnavailable):
            await backend.acall("locked", "it", deadline=clock.now() + 0.2)

    kwargs = {"ssl_ca_certs": str(certificates[2])}
    with Proxy("127.0.0.1", tls_redis.port, speaks="amqp") as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0"
        backend = RedisBackend(
            AliasOptions(
                "redis",
                "redis",
                location=url,
                options={"connection_kwargs": kwargs},
                command_timeout=5.0,
            )
        )
        # Else TLS waits for a farewell, and its socket is collected open.
        asyncio.run(main())
        gc.collect()
