"""What the Redis tests share."""

from __future__ import annotations

import secrets
from typing import Any

import redis

from django_dlock import clock
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.redis import RedisBackend
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from django_dlock.process import current
from testproject.servers import RedisServer

OPTIONS: dict[str, Any] = {}
"""What all backends of a test get besides their own options."""


def backend_for(location: str | None = None, **kwargs: Any) -> RedisBackend:
    kwargs["options"] = {**OPTIONS, **kwargs.get("options", {})}
    return RedisBackend(AliasOptions(alias="redis", backend="redis", location=location, **kwargs))


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


def renew(backend: RedisBackend, *leases: Lease) -> list[str]:
    renewals = [Renewal(lease.name, lease.owner, lease.ttl) for lease in leases]
    return list(backend.renew(renewals, process=current().id, deadline=backend.call_deadline()))


def wait(
    backend: RedisBackend, attempt: LeaseRequest, met: Contention, seconds: float
) -> Lease | None:
    until = clock.now() + seconds
    return backend.wait(
        attempt,
        met,
        until=until,
        deadline=until + backend.command_timeout,
        interrupted=lambda: False,
    )


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def calls(server: RedisServer) -> dict[str, int]:
    """How often the server has run each command so far."""
    with client(server) as asking:
        return {
            name.removeprefix("cmdstat_"): facts["calls"]
            for name, facts in asking.info("commandstats").items()
        }
