"""``OPTIONS["replicas"]``: a grant or a renewal counts only once replicas have it."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock import Lock, clock
from django_dlock.backends.redis import RedisBackend, connection
from django_dlock.exceptions import BackendRefused, BackendUnavailable, InvalidLockBackend
from django_dlock.lease import Contention, Lease
from django_dlock.process import current
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.aliases import alias, configured
from tests.support.databases import until
from tests.support.redis_calls import (
    backend_for,
    client,
    grant,
    refuse,
    release,
    renew,
    renewals,
    request,
    wait,
)

UNHURRIED = 5.0
"""A command timeout that is long enough although the servers may stand still."""


def _is_online(info: dict[str, Any], port: int) -> bool:
    found = (each for each in info.values() if isinstance(each, dict))
    return any((each["port"], each["state"]) == (port, "online") for each in found)


@contextlib.contextmanager
def replica_of(primary: RedisServer) -> Iterator[RedisServer]:
    args = ["--replicaof", "127.0.0.1", str(primary.port)]
    with RedisServer(args=args) as server:
        with client(primary) as asking:
            # It is counted once it has all data.
            until(lambda: _is_online(asking.info("replication"), server.port))
        yield server


@pytest.fixture
def primary() -> Iterator[RedisServer]:
    try:
        server = RedisServer(args=["--repl-diskless-sync-delay", "0"]).start()
    except ServerNotFound as error:
        missing(str(error))
    with server:
        yield server


@pytest.fixture
def replica(primary: RedisServer) -> Iterator[RedisServer]:
    with replica_of(primary) as server:
        yield server


@pytest.fixture
def gives_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas get half a second of ``UNHURRIED``; the rest is for a machine with other work."""
    monkeypatch.setattr(connection, "REPLICAS_TAKE_AT_MOST", 0.5 / UNHURRIED)


def confirming(server: RedisServer, url: str = "", **options: object) -> RedisBackend:
    timeout = options.pop("command_timeout", 20.0)
    return backend_for(
        url or server.url, command_timeout=timeout, options={"replicas": 1, **options}
    )


def promote(replica: RedisServer) -> None:
    with client(replica) as asking:
        asking.replicaof("NO", "ONE")


# -- a replica that follows ------------------------------------------------------------


def test_g11_after_a_fail_over_nobody_else_gets_a_confirmed_lease(primary, replica):
    lease = grant(confirming(primary), request())
    primary.kill()
    promote(replica)
    heir = backend_for(replica.url)
    assert refuse(heir, request()).owner == lease.owner
    assert renew(heir, lease) == ["renewed"]
    assert release(heir, lease) == "released"
    assert grant(heir, request()).token > lease.token


def test_g11_a_lease_that_is_handed_over_is_confirmed(primary, replica, gives_up_soon):
    backend = confirming(primary)
    first, waiter = grant(backend, request()), request(waits=True, renewed=True)
    # The second one is sent while the process is listening.
    refuse(backend, waiter)
    wait(backend, waiter, refuse(backend, waiter), 20)
    met = refuse(backend, waiter)
    assert release(backend, first) == "released"
    # It was handed over, but that is not known of the replica.
    assert wait(backend, waiter, met, 10) is None
    assert backend_for(primary.url).get("name").owner == waiter.owner
    replica.pause()
    quick = confirming(primary, command_timeout=UNHURRIED)
    with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
        grant(quick, waiter)
    replica.resume()
    assert grant(backend, waiter).token > first.token


def test_g11_a_renewal_is_confirmed(primary, replica):
    backend = confirming(primary)
    lease = grant(backend, request())
    assert renew(backend, lease) == ["renewed"]
    pending = backend.start_renew(
        renewals(lease), process=current().id, deadline=backend.call_deadline()
    )
    assert [result.outcome for result in pending.result()] == ["renewed"]


def test_g11_a_server_without_free_memory_renews_what_is_held(primary, replica):
    backend = confirming(primary)
    lease = grant(backend, request())
    with client(primary) as asking:
        asking.config_set("maxmemory", 1)
    assert renew(backend, lease) == ["renewed"]


# -- no replica ------------------------------------------------------------------------


def test_g11_a_grant_that_is_not_confirmed_does_not_count_and_is_cancelled(
    primary, replica, gives_up_soon
):
    options = {"command_timeout": UNHURRIED, "replicas": 1}
    settings = alias(primary.url, TTL=60.0, OPTIONS=options)
    with configured({"default": settings}):
        with Lock("warm"):
            pass
        replica.pause()
        try:
            with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
                Lock("name").acquire(timeout=0)
            until(lambda: backend_for(primary.url).get("name") is None)
        finally:
            replica.resume()


def test_g11_a_renewal_that_is_not_confirmed_is_reported_as_unanswered(
    primary, replica, gives_up_soon
):
    backend, quick = confirming(primary), confirming(primary, command_timeout=UNHURRIED)
    lease = grant(backend, request())
    replica.pause()
    try:
        assert renew(quick, lease) == ["unanswered"]
        pending = quick.start_renew(
            renewals(lease), process=current().id, deadline=quick.call_deadline()
        )
        assert [result.outcome for result in pending.result()] == ["unanswered"]
    finally:
        replica.resume()
    assert renew(backend, lease) == ["renewed"]


def test_g2_a_refused_renewal_is_reported_although_no_replica_answers(
    primary, replica, gives_up_soon
):
    backend = confirming(primary)
    kept, other = grant(backend, request("kept")), grant(backend, request("other"))
    release(backend, other)
    grant(backend, request("other"))
    replica.pause()
    try:
        outcomes = renew(confirming(primary, command_timeout=UNHURRIED), kept, other)
        assert outcomes == ["unanswered", "released"]
    finally:
        replica.resume()


def test_g2_a_holder_without_replicas_is_in_doubt_and_then_loses_its_lease(primary, replica):
    # It is in doubt for longer than a busy machine keeps this thread from looking.
    settings = alias(primary.url, TTL=4.5, OPTIONS={"command_timeout": 0.6, "replicas": 1})
    with configured({"default": settings}):
        told = threading.Event()
        lock = Lock("name", on_lost=lambda lock, reason: told.set())
        assert lock.acquire()
        replica.pause()
        try:
            until(lambda: lock.state == "in_doubt")
            assert told.wait(30)
            assert lock.lost
        finally:
            replica.resume()


def test_g10_a_server_without_replicas_answers_within_the_time_allowed(primary):
    backend = confirming(primary, command_timeout=4.0)
    began = clock.now()
    with pytest.raises(BackendUnavailable, match="0 of 1 replicas"):
        backend.acquire(request(), deadline=backend.call_deadline())
    # Its answer, half a second early at the least; not the socket's timeout.
    assert 0.9 <= clock.now() - began < 4.0 + 3.0


def test_contention_waits_for_no_replica(primary, replica):
    lease = grant(confirming(primary), request())
    replica.pause()
    try:
        assert refuse(confirming(primary), request()).owner == lease.owner
    finally:
        replica.resume()


# -- the other end of a fail-over ------------------------------------------------------


def test_g11_a_primary_that_becomes_a_replica_during_the_wait_grants_nothing(primary):
    backend = confirming(primary)
    outcome: list[Lease | Contention | BackendUnavailable] = []

    def acquire() -> None:
        try:
            outcome.append(backend.acquire(request(), deadline=clock.now() + 6))
        except BackendUnavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=acquire)
    thread.start()
    with RedisServer() as other, client(primary) as asking:
        until(lambda: asking.info("clients")["blocked_clients"] == 1)
        asking.replicaof("127.0.0.1", other.port)
        thread.join(60)
    # Not a refusal: another attempt may reach the new primary.
    assert type(outcome[0]) is BackendUnavailable


# -- settings --------------------------------------------------------------------------


def test_g11_a_user_who_may_not_ask_for_replicas_gets_no_lock(primary, replica):
    with client(primary) as admin:
        name = f"user-{secrets.token_hex(4)}"
        admin.execute_command("ACL", "SETUSER", name, "on", ">pw", "~*", "&*", "+@all", "-wait")
    url = primary.url.replace("redis://", f"redis://{name}:pw@")
    settings = alias(url, TTL=60.0, OPTIONS={"command_timeout": 20.0, "replicas": 1})
    with configured({"default": settings}):
        with pytest.raises(BackendRefused, match="wait"):
            Lock("name").acquire(timeout=0)
        # The server had granted it before.
        until(lambda: backend_for(primary.url).get("name") is None)


@pytest.mark.parametrize("count", [-1, True, "1", 1.0])
def test_a_wrong_number_of_replicas_is_an_error(count):
    with pytest.raises(InvalidLockBackend, match=r"\['replicas'\] is .* at least 0"):
        backend_for("redis://127.0.0.1:1/0", options={"replicas": count})


def test_the_check_warns_of_too_few_replicas(primary):
    backend = confirming(primary)
    (problem,) = backend.store_problems()
    assert problem.id == "W011"
    assert "by 1 replicas of its Redis, which has 0" in problem.message
    with replica_of(primary):
        (problem,) = backend.store_problems()
        assert problem.id == "W011"
        assert "which has 1: while one of them is down" in problem.message
        with replica_of(primary):
            assert backend.store_problems() == []
    assert backend_for(primary.url).store_problems() == []


def test_without_the_option_no_replica_is_asked(primary):
    backend = backend_for(primary.url)
    renew(backend, grant(backend, request()))
    with client(primary) as asking:
        assert "cmdstat_wait" not in asking.info("commandstats")
