"""The backends on servers and poolers as services offer them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock import clock
from django_dlock.backends.base import AliasOptions, BaseLockBackend
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.redis import RedisBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.testing import BackendContract
from testproject.servers import RedisServer
from tests.support import databases, postgres
from tests.support.contract_parts import each_command
from tests.support.redis_calls import backend_for, grant, refuse, release, request, wait
from tests.support.services import RedisService, SharedSessions

REFUSED = ("WAIT", "INFO", "CONFIG", "CLIENT", "MONITOR", "ACL", "SCRIPT", "PUBSUB")
"""What at least one service refuses, of what a client may send outside scripts."""


@pytest.fixture
def service(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[RedisService]:
    """The parameter is what scripts are told about subscribers; or that nobody may subscribe."""
    told = request.param
    refused = REFUSED if told != "unsubscribed" else (*REFUSED, "SUBSCRIBE")
    counts = told if told != "unsubscribed" else "right"
    with RedisService(redis_server.port, refuses=refused, counts=counts) as service:
        yield service


@pytest.mark.parametrize("service", ["right", "none", "refused"], indirect=True)
@each_command
class TestHostedRedis(BackendContract):
    # Waiters that cannot be counted ask again every few tenths of a second.
    SHORT = 1.5
    SPREAD = 0.6

    @pytest.fixture
    def backend(self, service: RedisService) -> RedisBackend:
        return backend_for(service.url, key_prefix=f"test-{secrets.token_hex(4)}")


@pytest.mark.parametrize(
    ("service", "found"),
    [
        ("right", {"W011", "W012"}),
        ("none", {"W006", "W011", "W012"}),
        ("unsubscribed", {"W006", "W011", "W012"}),
    ],
    indirect=["service"],
)
def test_the_check_says_what_a_service_cannot_do(service: RedisService, found: set[str]) -> None:
    # With a prefix of its own, because another test may have subscribed in this process.
    prefix = f"test-{secrets.token_hex(4)}"
    backend = backend_for(service.url, options={"replicas": 1}, key_prefix=prefix)
    assert {problem.id for problem in backend.store_problems()} == found


@pytest.mark.parametrize("service", ["none", "refused", "unsubscribed"], indirect=True)
def test_g4_a_waiter_that_cannot_be_notified_asks_again_soon(service: RedisService) -> None:
    backend = backend_for(service.url, key_prefix=f"test-{secrets.token_hex(4)}")
    grant(backend, request(ttl=600.0))
    attempt = request(waits=True)
    # The remaining TTL is long, and no message comes: every wait ends without one, long before its
    # patience does.
    began = clock.now()
    for _ in range(4):
        assert wait(backend, attempt, refuse(backend, attempt), 20.0) is None
    assert clock.now() < began + 20.0


@pytest.mark.parametrize("service", ["deaf"], indirect=True)
def test_g1_a_lease_that_was_announced_is_granted_though_the_server_counts_no_receiver(
    service: RedisService,
) -> None:
    backend = backend_for(service.url, key_prefix=f"test-{secrets.token_hex(4)}")
    lease, attempt = grant(backend, request()), request(waits=True, renewed=True)
    # The first wait makes the process subscribe.
    wait(backend, attempt, refuse(backend, attempt), 20.0)
    met = refuse(backend, attempt)
    assert release(backend, lease) == "released"
    handed = wait(backend, attempt, met, 20.0)
    assert handed is not None
    assert refuse(backend, request()).owner == handed.owner


@pytest.fixture
def pooled(
    request: pytest.FixtureRequest,
    postgres_alias: str,
    postgres_url: str,
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[str]:
    """The alias of a database behind a pooler; the parameter is what the pooler refuses."""
    port = urlsplit(postgres_url).port or 5432
    with SharedSessions(port, refuses=request.param) as pooler:
        url = urlsplit(postgres_url)._replace(netloc=_through(postgres_url, pooler.port)).geturl()
        with databases.added("pooled", postgres.settings_for(url)), django_db_blocker.unblock():
            yield "pooled"


def _through(url: str, port: int) -> str:
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    return f"{user}{at}127.0.0.1:{port}"


def on_database(alias: str, **options: Any) -> DatabaseBackend:
    return DatabaseBackend(
        AliasOptions(
            alias="database",
            backend="database",
            key_prefix=f"test-{secrets.token_hex(4)}",
            command_timeout=5.0,
            options={"database": alias, **options},
        )
    )


@pytest.mark.parametrize("pooled", [("PREPARE", "EXECUTE", "LISTEN")], indirect=True)
@each_command
class TestPostgresBehindAPoolerWithoutSessions(BackendContract):
    SHORT = 1.5
    SPREAD = 0.6

    @pytest.fixture
    def backend(self, pooled: str) -> Iterator[BaseLockBackend]:
        backend = on_database(pooled)
        yield backend
        backend.close()


@pytest.mark.parametrize("pooled", [("SET",)], indirect=True)
def test_the_check_says_that_a_pooler_refuses_the_settings_of_a_transaction(pooled: str) -> None:
    with (
        contextlib.closing(on_database(pooled)) as backend,
        pytest.raises(BackendUnavailable, match="SET is not supported by this pooler"),
    ):
        backend.store_problems()
