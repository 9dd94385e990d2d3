"""Single calls of the Redis backend, with the arguments that most tests use."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

import redis

from django_dlock import clock
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.redis.connection import Connection
from django_dlock.backends.redis.pool import URGENT, Pool
from django_dlock.backends.shared.pool import NoSlot
from django_dlock.backends.slots import Slot
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from django_dlock.process import current
from testproject.servers import RedisServer

MADE: list[RedisBackend] = []
"""Made by ``backend_for`` in the current test; closed at its end."""


def backend_for(location: str | None = None, **kwargs: Any) -> RedisBackend:
    """A backend with the settings of ``options_for``."""
    MADE.append(RedisBackend(options_for(location, **kwargs)))
    return MADE[-1]


def options_for(location: str | None = None, **kwargs: Any) -> AliasOptions:
    """Settings with enough time for commands, unless ``command_timeout`` is given."""
    kwargs = {"command_timeout": 20.0, **kwargs}
    return AliasOptions(alias="redis", backend="redis", location=location, **kwargs)


def request(name: str = "name", ttl: float = 30.0, **kwargs: Any) -> LeaseRequest:
    return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=ttl, **kwargs)


def grant(backend: RedisBackend, attempt: LeaseRequest) -> Lease:
    answer = backend.acquire(attempt, deadline=backend.call_deadline())
    assert isinstance(answer, Lease), answer
    return answer


def refuse(backend: RedisBackend, attempt: LeaseRequest) -> Contention:
    answer = backend.acquire(attempt, deadline=backend.call_deadline())
    assert isinstance(answer, Contention), answer
    return answer


def release(backend: RedisBackend, lease: Lease) -> str:
    return backend.release(lease.name, lease.owner, min_hold=0.0, deadline=backend.call_deadline())


def renewals(*leases: Lease) -> list[Renewal]:
    return [Renewal(lease.name, lease.owner, lease.ttl) for lease in leases]


def renew(backend: RedisBackend, *leases: Lease) -> list[str]:
    results = backend.renew(
        renewals(*leases), process=current().id, deadline=backend.call_deadline()
    )
    return [result.outcome for result in results]


def wait(
    backend: RedisBackend, attempt: LeaseRequest, met: Contention, seconds: float
) -> Lease | None:
    return backend.wait(attempt, met, until=clock.now() + seconds, interrupted=lambda: False)


def pool_of(backend: RedisBackend) -> Pool:
    """Its connections; for coroutines, those of the backend that is awaited."""
    pool: Pool = getattr(backend, "awaited", backend)._pool
    return pool


def free_slots(pool: Pool) -> int:
    """How many more calls it could serve at the same time."""
    taken: list[Slot] = []
    with suppress(NoSlot):
        while True:
            taken.append(pool.take(URGENT, clock.now()))
    for slot in taken:
        slot.release()
    return len(taken)


def idle_connection(backend: RedisBackend) -> Connection:
    """The connection that the next call will use."""
    pool = pool_of(backend)
    found = pool.take_idle()
    assert found is not None
    slot, connection = found
    pool.keep(connection)
    slot.release()
    return connection


def socket_of(connection: Connection) -> Any:
    """For a test that acts as the server or as a broken network."""
    return connection._sock


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def calls(server: RedisServer) -> dict[str, int]:
    """How often the server has run each command so far."""
    with client(server) as asking:
        return {
            name.removeprefix("cmdstat_"): facts["calls"]
            for name, facts in asking.info("commandstats").items()
        }
