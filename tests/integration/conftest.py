"""Shared fixtures for tests on real workers; each file defines its own ``site``."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.workers import OVER, Place, Site, orders


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A Redis for this file only."""
    try:
        with RedisServer() as server:
            yield server
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture
def place(site: Site) -> Iterator[Place]:
    """Bodies that wait in it end with the test, so that no later one misses their process."""
    place = site.place()
    yield place
    place.open(OVER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the workers of a failed test said last."""
    report = yield
    site = getattr(item, "funcargs", {}).get("site")
    if report.failed and isinstance(site, Site):
        for worker in site.workers:
            report.sections.append((f"log of worker {worker.process.pid}", worker.output[-6000:]))
    return report


@pytest.fixture
def order() -> int:
    return next(orders)
