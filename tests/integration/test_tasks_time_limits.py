"""The time limit that a worker enforces is the one that bounds the lock."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from celery.exceptions import TimeLimitExceeded

from testproject.servers import RedisServer
from tests.support.workers import Site, Worker, eventually, result

pytestmark = pytest.mark.extended

HAS_GEVENT = importlib.util.find_spec("gevent") is not None
no_gevent = pytest.mark.skipif(not HAS_GEVENT, reason="gevent is not installed: there is no wheel")
POOLS = ["prefork", "threads", "solo", pytest.param("gevent", marks=no_gevent)]


@pytest.fixture(scope="module")
def site(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("limits")
    with Site(redis, directory, tasks="tests.support.tasks_pools") as site:
        yield site
        for worker in site.workers:
            # Under gevent, Celery takes seconds to shut down.
            worker.kill()


def started(site: Site, pool: str, *options: str) -> Worker:
    """A worker that has its queue for itself."""
    return site.worker(pool, 1, *options)


def limit(site: Site, task: str, hard: int) -> None:
    """As an operator does at run time."""

    def tell() -> list[object]:
        return site.app.control.time_limit(task, soft=None, hard=hard, reply=True, timeout=1)

    eventually(tell, why="the worker answered")


@pytest.fixture
def queue(order: int) -> str:
    return f"limits-{order}"


def send(site: Site, task: str, order: int, place: object, seconds: float, **options):
    return site.app.send_task(task, (order, str(place), seconds), **options)


@pytest.mark.parametrize("pool", POOLS)
def test_a_limit_that_was_raised_at_run_time_does_not_end_the_lock(site, place, order, queue, pool):
    worker = started(site, pool, "-Q", queue)
    limit(site, "limited", 30)
    sent = send(site, "limited", order, place, 3.0, queue=queue)
    assert result(sent) == order
    assert len(place.lines(f"began-{order}")) == 1
    worker.kill()


@pytest.mark.parametrize("pool", POOLS)
def test_a_limit_that_was_lowered_at_run_time_ends_the_body(site, place, order, queue, pool):
    worker = started(site, pool, "-Q", queue)
    limit(site, "unlimited", 1)
    sent = send(site, "unlimited", order, place, 30.0, queue=queue)
    with pytest.raises(TimeLimitExceeded, match=r"\b1"):
        result(sent)
    assert len(place.lines(f"began-{order}")) == 1
    worker.kill()


@pytest.mark.parametrize("pool", POOLS)
def test_the_limit_of_the_worker_itself_ends_the_body(site, place, order, queue, pool):
    worker = started(site, pool, "-Q", queue, "--time-limit", "1")
    sent = send(site, "unlimited", order, place, 30.0, queue=queue)
    with pytest.raises(TimeLimitExceeded, match=r"\b1"):
        result(sent)
    # The message's own limit is stronger.
    sent = send(site, "unlimited", order, place, 3.0, queue=queue, time_limit=30)
    assert result(sent) == order
    worker.kill()


@pytest.mark.parametrize("pool", POOLS)
def test_the_limit_of_a_message_is_stronger_than_that_of_the_task(site, place, order, queue, pool):
    worker = started(site, pool, "-Q", queue)
    sent = send(site, "limited", order, place, 3.0, queue=queue, time_limit=30)
    assert result(sent) == order
    worker.kill()
