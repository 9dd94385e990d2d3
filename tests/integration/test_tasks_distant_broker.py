"""Bodies lose their lease while they publish to a distant broker: real workers of each pool."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from celery.result import AsyncResult

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support import postgres
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, Place, Site, Worker, eventually, orders, result

pytestmark = pytest.mark.extended

DISTANCE = 0.02
"""Seconds for which each reply of the broker is under way."""

HAS_GEVENT = importlib.util.find_spec("gevent") is not None
no_gevent = pytest.mark.skipif(not HAS_GEVENT, reason="gevent is not installed: there is no wheel")
POOLS = ["prefork", "threads", "solo", pytest.param("gevent", marks=no_gevent)]


@pytest.fixture(scope="module")
def locks() -> Iterator[RedisServer]:
    """A Redis for the locks alone, which may be paused."""
    try:
        with RedisServer() as server:
            yield server
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def site(
    request: pytest.FixtureRequest,
    redis: RedisServer,
    locks: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """Only the workers are far from their broker."""
    rabbit = request.param == "rabbitmq"
    server: Any = request.getfixturevalue("rabbit_server") if rabbit else redis
    directory = tmp_path_factory.mktemp("distant")
    try:
        with (
            Proxy("127.0.0.1", server.port, speaks="amqp") as proxy,
            postgres.database() as database,
            Site(
                redis,
                directory,
                postgres=database,
                locks=locks.url,
                broker=server.url,
                transport={"confirm_publish": True} if rabbit else {},
                settings={
                    "CELERY_BROKER_URL": server.url.replace(str(server.port), str(proxy.port))
                },
                tasks="tests.support.tasks_pools",
            ) as site,
        ):
            proxy.delay = DISTANCE
            yield site
            proxy.delay = 0.0
    except postgres.PostgresNotFound as error:
        missing(str(error))


def stopped(site: Site, place: Place, order: int, task: str, queue: str) -> AsyncResult:
    """A body of this task that has lost its lease."""
    sent: AsyncResult = site.send(task, order, str(place), queue=queue)
    place.wait(f"wrote-{order}")
    site.break_lock(order)
    return sent


@pytest.mark.parametrize("pool", POOLS)
def test_g13_bodies_that_publish_when_they_lose_their_lease_neither_fail_nor_hang(
    site, place, pool, locks
):
    queue = f"distant-{pool}"
    worker: Worker = site.worker(pool, 1, "-Q", queue)
    first, second, third = (next(orders) for _ in range(3))
    assert result(stopped(site, place, first, "publishes", queue)) == 2
    assert result(stopped(site, place, second, "retries", queue)) == 2
    # The same outage ends the lease and makes the body retry.
    sent = site.send("autoretries", third, str(place), queue=queue)
    place.wait(f"wrote-{third}")
    locks.pause()
    try:
        eventually(
            lambda: f"'order:{third}' (alias 'default') was lost" in worker.output,
            why="the lease ended",
        )
    finally:
        locks.resume()
    assert result(sent) == 2
    assert [site.effects(order) for order in (first, second, third)] == [1, 1, 1]
    # A warm shutdown ends, because nothing hangs.
    worker.process.terminate()
    worker.process.wait(PATIENCE)
