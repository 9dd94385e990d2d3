"""Fixtures for the tests of the backends."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from pytest_django import DjangoDbBlocker

from tests.support import redis_calls
from tests.support.database_bed import Bed
from tests.support.proxy import Proxy


@pytest.fixture(autouse=True)
def backends_are_closed() -> Iterator[None]:
    """Close all backends, so that the garbage collector does not finalize an open socket first."""
    yield
    while redis_calls.MADE:
        redis_calls.MADE.pop().close()


@pytest.fixture
def bed(django_db_blocker: DjangoDbBlocker) -> Iterator[Bed]:
    bed = Bed()
    with django_db_blocker.unblock(), bed.stack:
        yield bed


@pytest.fixture
def postgres_proxy(postgres_url: str) -> Iterator[Proxy]:
    parts = urlsplit(postgres_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 5432, speaks="postgres") as proxy:
        yield proxy


@pytest.fixture
def mariadb_proxy(mariadb_url: str) -> Iterator[Proxy]:
    parts = urlsplit(mariadb_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 3306, speaks="amqp") as proxy:
        yield proxy
