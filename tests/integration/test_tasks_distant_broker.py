"""Bodies lose their lease while they publish to a distant broker: real workers of each pool."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support import postgres
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, Site, Worker, eventually, result

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


def started(site: Site, pool: str) -> tuple[Worker, str]:
    queue = f"distant-{pool}-{len(site.workers)}"
    return site.worker(pool, 2 if pool != "solo" else 1, "-Q", queue), queue


def ends(worker: Worker) -> None:
    """A warm shutdown ends, with nothing left to wait for."""
    worker.process.terminate()
    worker.process.wait(PATIENCE)


@pytest.mark.parametrize("pool", POOLS)
def test_g13_a_body_that_publishes_again_and_again_ends_and_its_worker_does(
    site, place, order, pool
):
    worker, queue = started(site, pool)
    sent = site.send("publishes", order, str(place), queue=queue)
    place.wait(f"wrote-{order}")
    site.break_lock(order)
    assert result(sent) == 2
    assert site.effects(order) == 1
    ends(worker)


@pytest.mark.parametrize("pool", POOLS)
def test_g13_a_retry_of_an_interrupted_body_is_no_failure(site, place, order, pool):
    worker, queue = started(site, pool)
    sent = site.send("retries", order, str(place), queue=queue)
    place.wait(f"wrote-{order}")
    site.break_lock(order)
    assert result(sent) == 2
    assert site.effects(order) == 1
    ends(worker)


@pytest.mark.parametrize("pool", POOLS)
def test_g13_an_automatic_retry_in_an_outage_of_the_locks_is_no_failure(
    site, place, order, pool, locks
):
    worker, queue = started(site, pool)
    sent = site.send("autoretries", order, str(place), queue=queue)
    place.wait(f"wrote-{order}")
    locks.pause()
    try:
        eventually(
            lambda: f"'order:{order}' (alias 'default') was lost" in worker.output,
            why="the lease ended",
        )
    finally:
        locks.resume()
    assert result(sent) == 2
    assert site.effects(order) == 1
    ends(worker)
