"""Shared fixtures for tests on real workers; each file defines its own ``site``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.workers import Place, Site, orders


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for this file only."""
    try:
        with RedisServer() as server:
            yield server
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture
def place(site: Site) -> Place:
    return site.place()


@pytest.fixture
def order() -> int:
    return next(orders)
