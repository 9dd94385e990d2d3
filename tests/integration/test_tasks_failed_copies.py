"""Copies of messages whose run has failed for good, in each pool and on both brokers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded
from kombu import Connection

from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.integration.test_tasks_pools import GEVENT, POOLS
from tests.support import postgres
from tests.support.proxy import Proxy
from tests.support.workers import Site, Worker, eventually, orders, result

pytestmark = pytest.mark.extended

TASKS = "tests.support.tasks_failing"


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """A PostgreSQL: a thread that waits for SQLite's write lock would block gevent's hub."""
    try:
        with postgres.database() as url:
            yield url
    except postgres.PostgresNotFound as error:
        missing(str(error))


@pytest.fixture(scope="module")
def site(
    redis: RedisServer, database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("failed")
    with Site(redis, directory, postgres=database, tasks=TASKS) as site:
        yield site
        for worker in site.workers:
            # Under gevent, Celery takes seconds to shut down.
            worker.kill()


@pytest.fixture(scope="module")
def started(site: Site) -> dict[str, list[Worker]]:
    """The workers started so far, by pool."""
    return {}


@pytest.fixture
def workers(pool: str, site: Site, started: dict[str, list[Worker]]) -> list[Worker]:
    """So many workers of the test's pool that two deliveries can run at once."""
    if pool not in started:
        count, size = (2, 1) if pool == "solo" else (1, 10)
        started[pool] = [site.worker(pool, size) for _ in range(count)]
    return started[pool]


def received(site: Site, sent: Any) -> int:
    return sum(worker.output.count(f"[{sent.id}] received") for worker in site.workers)


def copies(site: Site, sent: Any) -> int:
    """How many copies of the message have ended without a run."""
    what = f"[{sent.id}] is a copy of a message whose run has failed"
    return sum(worker.output.count(what) for worker in site.workers)


def failed(sent: Any) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the caller looks at it
        result(sent)
    return raised.value


@pytest.mark.parametrize("pool", POOLS)
def test_g12_a_copy_of_a_run_longer_than_the_visibility_timeout_does_not_run_when_that_fails(
    site, workers, place, order, pool
):
    sent = site.send("declines", order, str(place), "go", queue=pool)
    place.wait(f"began-{order}")
    site.redeliver()
    eventually(lambda: received(site, sent) >= 2, why="a copy has come")
    place.open("go")
    assert repr(failed(sent)) == "ValueError('declined')"
    eventually(lambda: copies(site, sent), why="the copy has ended")
    assert len(place.lines(f"began-{order}")) == 1
    assert site.record(order) == ("failed", 1, 0)
    # The error itself, or what is recorded, if the copy came before the error was stored.
    assert "ValueError('declined')" in repr(site.app.AsyncResult(sent.id).result)
    # A new message is not a copy.
    again = site.send("declines", order, str(place), "go", queue=pool)
    eventually(lambda: len(place.lines(f"began-{order}")) == 2)
    result(again)


@pytest.mark.parametrize("pool", ["prefork", GEVENT])
def test_g12_a_copy_of_a_run_that_meets_its_hard_limit_does_not_run(
    site, workers, place, order, pool
):
    sent = site.send("declines", order, str(place), "never", queue=pool, time_limit=2)
    place.wait(f"began-{order}")
    site.redeliver()
    eventually(lambda: received(site, sent) >= 2, why="a copy has come")
    assert isinstance(failed(sent), TimeLimitExceeded)
    eventually(lambda: copies(site, sent), why="the copy has ended")
    assert len(place.lines(f"began-{order}")) == 1
    eventually(lambda: site.record(order)[0] == "failed")


@pytest.mark.parametrize("pool", POOLS)
def test_g12_a_class_that_tries_again_runs_each_body_once(site, workers, place, pool):
    """The marks of deliveries that run at the same time are kept apart."""
    at_once = [next(orders) for _ in range(1 if pool == "solo" else 3)]
    sent = [site.send("flaky", order, str(place), "go", queue=pool) for order in at_once]
    for order in at_once:
        place.wait(f"began-{order}")
    place.open("go")
    assert [repr(failed(each)) for each in sent] == ["ValueError('declined')"] * len(sent)
    for order in at_once:
        assert len(place.lines(f"began-{order}")) == 1
        assert site.record(order) == ("failed", 1, 0)
    told = sum(worker.output.count("TriesAgain.__call__ has called") for worker in workers)
    assert told == len(sent)
    # The next delivery of the same process has its own mark.
    assert [result(site.send("ends", next(orders), str(place), queue=pool)) for _ in range(3)] == [
        1,
        1,
        1,
    ]


# -- RabbitMQ --------------------------------------------------------------------------


def amqp(port: int) -> str:
    return f"amqp://guest:guest@127.0.0.1:{port}//"


@pytest.fixture
def reading(rabbit_server: RabbitServer) -> Iterator[Proxy]:
    """Between RabbitMQ and the worker's consumer."""
    with Connection(rabbit_server.url) as connection:
        connection.SimpleQueue("prefork").clear()
    with Proxy("127.0.0.1", rabbit_server.port, speaks="amqp") as proxy:
        yield proxy


@pytest.fixture
def behind_rabbit(
    redis: RedisServer, rabbit_server: RabbitServer, reading: Proxy, database: str, tmp_path: Path
) -> Iterator[Site]:
    """A prefork worker that consumes through ``reading``."""
    settings = {"CELERY_BROKER_READ_URL": amqp(reading.port)}
    broker = rabbit_server.url
    with Site(
        redis, tmp_path, postgres=database, broker=broker, settings=settings, tasks=TASKS
    ) as site:
        site.worker("prefork")
        yield site


@pytest.mark.parametrize("when", ["in the middle", "at the end"])
def test_g12_a_copy_from_a_broken_connection_to_rabbitmq_does_not_run_when_the_first_one_fails(
    behind_rabbit, reading, order, when
):
    site = behind_rabbit
    place = site.place()
    sent = site.send("declines", order, str(place), "go", queue="prefork")
    place.wait(f"began-{order}")
    if when == "in the middle":
        reading.cut()
        eventually(lambda: received(site, sent) >= 2, why="a copy has come")
        place.open("go")
        failed(sent)
    else:
        # The acknowledgement is lost.
        reading.black_hole()
        place.open("go")
        failed(sent)
        reading.heal()
    eventually(lambda: copies(site, sent), why="the copy has ended")
    assert len(place.lines(f"began-{order}")) == 1
    assert site.record(order) == ("failed", 1, 0)


def test_g12_a_copy_after_the_consumer_timeout_does_not_run_when_the_first_one_fails(
    redis, database, tmp_path, order
):
    settings = {"CELERY_BROKER_CHANNEL_ERROR_RETRY": True}
    try:
        with (
            RabbitServer(consumer_timeout=3, channel_tick_interval=0.5) as rabbit,
            Site(
                redis,
                tmp_path,
                postgres=database,
                broker=rabbit.url,
                settings=settings,
                transport={"visibility_timeout": 2},
                tasks=TASKS,
            ) as site,
        ):
            place = site.place()
            site.worker("prefork", 3)
            sent = site.send("declines", order, str(place), "go", queue="prefork")
            place.wait(f"began-{order}")
            eventually(lambda: received(site, sent) >= 2, why="a copy has come")
            place.open("go")
            failed(sent)
            eventually(lambda: copies(site, sent), why="the copy has ended")
            assert len(place.lines(f"began-{order}")) == 1
    except (ServerNotFound, RuntimeError) as error:
        missing(str(error))
