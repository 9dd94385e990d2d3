"""Renewals that are longer than what a socket accepts at once."""

from __future__ import annotations

import socket
import threading

import pytest

from django_dlock import Lock, clock, locks
from django_dlock.backends.base import PendingRenewal
from django_dlock.backends.redis import RedisBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Renewal
from django_dlock.process import current
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured
from tests.support.redis_calls import (
    backend_for,
    client,
    grant,
    idle_connection,
    release,
    renew,
    request,
    socket_of,
)

from .test_redis_connections import certificates, tls_redis

__all__ = ["certificates", "tls_redis"]


@pytest.fixture(params=["tcp", "tls"])
def server(request: pytest.FixtureRequest) -> RedisServer:
    server: RedisServer = request.getfixturevalue(
        "own_redis" if request.param == "tcp" else "tls_redis"
    )
    return server


@pytest.fixture
def backend(server: RedisServer) -> RedisBackend:
    kwargs = {"ssl_ca_certs": str(server.tls[2])} if server.tls else {}
    return backend_for(server.url, command_timeout=30.0, options={"connection_kwargs": kwargs})


def held(backend: RedisBackend) -> list[Renewal]:
    """500 leases, and an idle connection that accepts only a part of their renewal."""
    names = [f"{number:03}{'🔒' * 230}" for number in range(RedisBackend.renewals_per_call)]
    leases = [grant(backend, request(name)) for name in names]
    # Load the script at the server.
    renew(backend)
    socket_of(idle_connection(backend)).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return [Renewal(lease.name, lease.owner, 60.0) for lease in leases]


def start(backend: RedisBackend, renewals: list[Renewal]) -> PendingRenewal:
    return backend.start_renew(
        renewals, process=current().id, deadline=clock.now() + backend.command_timeout
    )


def test_g6_a_server_that_reads_nothing_does_not_block_the_sender(
    backend: RedisBackend, server: RedisServer
) -> None:
    renewals = held(backend)
    threads = set(threading.enumerate())
    server.pause()
    try:
        began = clock.now()
        pending = start(backend, renewals)
        assert not pending.wait(0.05)
        assert not pending.wait(0.0)
        assert clock.now() - began < 15
        assert pending._connection._unsent  # type: ignore[attr-defined]
    finally:
        server.resume()
    assert pending.wait(20)
    assert [r.outcome for r in pending.result()] == ["renewed"] * RedisBackend.renewals_per_call
    assert set(threading.enumerate()) <= threads
    # The used connection can be used again.
    assert renew(backend, grant(backend, request())) == ["renewed"]


def test_g6_the_rest_of_a_renewal_is_not_read_as_another_command(
    backend: RedisBackend, server: RedisServer
) -> None:
    renewals = held(backend)
    server.pause()
    try:
        pending = start(backend, renewals)
        pending.wait(0.05)
        pending.abandon()
    finally:
        server.resume()
    lease = grant(backend, request())
    assert release(backend, lease) == "released"
    assert {info.renewals for info in backend.list()} == {0}


def test_g6_a_renewal_that_breaks_in_the_middle_is_repeated(
    backend: RedisBackend, server: RedisServer
) -> None:
    renewals = held(backend)
    server.pause()
    try:
        pending = start(backend, renewals)
        assert not pending.wait(0.05)
        pending._connection._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        pending.wait(0.05)
    finally:
        server.resume()
    assert pending.wait(20)
    assert [r.outcome for r in pending.result()] == ["renewed"] * RedisBackend.renewals_per_call


def test_g10_a_reply_is_waited_for_until_the_deadline_only(
    backend: RedisBackend, server: RedisServer
) -> None:
    renewals = held(backend)
    server.pause()
    try:
        began = clock.now()
        pending = backend.start_renew(renewals, process=current().id, deadline=began + 0.5)
        with pytest.raises(BackendUnavailable):
            pending.result()
        assert clock.now() - began < 15
    finally:
        server.resume()


def test_one_thread_renews_many_leases_on_at_most_two_connections(
    own_redis: RedisServer,
) -> None:
    # Longer than a thread can be late on a busy machine.
    entry = alias(own_redis.url, TTL=6.0, OPTIONS={"command_timeout": 2.0})
    with configured({"default": entry}), client(own_redis) as asking:
        held = [Lock(f"n{number}") for number in range(RedisBackend.renewals_per_call + 100)]
        for lock in held:
            assert lock.acquire(blocking=False)
        # Load the script at the server.
        renew(locks["default"])
        before = {thread.name for thread in threading.enumerate()}
        threads: set[str] = set()
        connections = 0
        while min(int(asking.hget(f"{{dlock:0}}:2:l:{lock.name}", "n") or 0) for lock in held) < 2:
            threads |= {thread.name for thread in threading.enumerate()}
            others = [one for one in asking.client_list() if one["id"] != str(asking.client_id())]
            connections = max(connections, len(others))
        assert "dlock-watchdog" in threads
        assert "dlock-call" not in threads - before
        assert connections <= 2
        assert all(lock.held for lock in held)
        for lock in held:
            lock.release()
