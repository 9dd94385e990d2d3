"""Contended messages of a worker that RabbitMQ does not let publish to the default exchange."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kombu import Exchange, Queue

from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer
from tests.integration.test_tasks_faults import hold, let_go, requeues
from tests.support.workers import Place, Site, Worker, eventually, orders, result

pytestmark = pytest.mark.extended

HAS_GEVENT = importlib.util.find_spec("gevent") is not None
no_gevent = pytest.mark.skipif(not HAS_GEVENT, reason="gevent is not installed: there is no wheel")
POOLS = ["prefork", "threads", "solo", pytest.param("gevent", marks=no_gevent)]

AT_START = "The broker does not let this worker publish: "
BUT_DEFAULT = r"^(?!amq\.default$).*$"
numbers = itertools.count()


@pytest.fixture(scope="module")
def reader(rabbit_server: RabbitServer) -> str:
    """The URL of a user that may write everywhere but to the default exchange."""
    rabbit_server.control("add_user", "reader", "secret")
    rabbit_server.control("set_permissions", "reader", ".*", BUT_DEFAULT, ".*")
    return rabbit_server.url.replace("guest:guest", "reader:secret")


@contextmanager
def site_of(
    redis: RedisServer, rabbit: RabbitServer, reader: str, directory: Path, **settings: Any
) -> Iterator[Site]:
    """Only the workers have no right to write."""
    settings = {"CELERY_BROKER_URL": reader, **settings}
    with Site(redis, directory, broker=rabbit.url, settings=settings) as site:
        yield site
        for worker in site.workers:
            # Under gevent, Celery takes seconds to shut down.
            worker.kill()


def in_one_exchange(*names: str, **arguments: object) -> dict[str, Any]:
    """Settings for queues none of which has an exchange for itself."""
    entry = {"exchange": f"one-{next(numbers)}", "queue_arguments": arguments}
    queues = {name: {**entry, "routing_key": name} for name in names}
    return {"CELERY_TASK_QUEUES": queues, "CELERY_TASK_DEFAULT_QUEUE": names[0]}


def given_back(site: Site) -> int:
    return sum(worker.output.count("is given back to the broker") for worker in site.workers)


def send(site: Site, order: int, place: Place, queue: str) -> Any:
    # The client declares nothing, because the worker's settings say how.
    to = Queue(queue, Exchange("", "direct"), routing_key=queue, no_declare=True)
    return site.send("charge", order, str(place), queue=to, declare=[])


def test_g13_a_message_goes_back_through_the_queues_own_exchange(
    redis, rabbit_server, reader, tmp_path, order
):
    with site_of(redis, rabbit_server, reader, tmp_path) as site:
        place, queue = site.place(), f"own-{order}"
        worker = site.worker("prefork", 1, "-Q", queue)
        assert worker.output.count(AT_START) == 1
        hold(site, order)
        sent = send(site, order, place, queue)
        eventually(lambda: requeues(site) >= 3, why="it was requeued")
        let_go(site, order)
        assert result(sent) == 1
        assert given_back(site) == 0
        assert site.effects(order) == 1


def test_g13_an_exchange_that_is_not_bound_to_the_queue_drops_no_message(
    redis, rabbit_server, reader, tmp_path, order
):
    with site_of(redis, rabbit_server, reader, tmp_path) as site:
        place, queue = site.place(), f"unbound-{order}"
        site.worker("prefork", 1, "-Q", queue)
        with site.app.connection_for_write() as connection:
            connection.default_channel.queue_unbind(queue, queue, queue)
        hold(site, order)
        sent = send(site, order, place, queue)
        eventually(lambda: given_back(site) >= 2, why="it was given back")
        assert requeues(site) == 0
        let_go(site, order)
        assert result(sent) == 1
        assert site.effects(order) == 1


@pytest.mark.parametrize("pool", POOLS)
def test_g13_a_message_that_may_not_be_published_waits_without_a_slot(
    redis, rabbit_server, reader, tmp_path, pool
):
    order = next(orders)
    names = (f"a-{order}", f"b-{order}")
    queues = in_one_exchange(*names)
    with site_of(redis, rabbit_server, reader, tmp_path, **queues) as site:
        place = site.place()
        worker: Worker = site.worker(pool, 1, "-Q", ",".join(names))
        assert worker.output.count(AT_START) == 1
        assert "amq.default" in worker.output
        hold(site, order)
        sent = send(site, order, place, names[1])
        eventually(lambda: given_back(site) >= 3, why="it was given back again and again")
        # The back-off grows, because the worker remembers how often it came.
        longest = [line for line in worker.output.splitlines() if "is given back" in line][-1]
        assert "in 0." not in longest
        # The only slot, and the only message that is prefetched, are free for others.
        before, others = given_back(site), [next(orders) for _ in range(3)]
        ends = [send(site, other, place, names[1]) for other in others]
        assert [result(end) for end in ends] == [1, 1, 1]
        assert given_back(site) <= before + 1
        let_go(site, order)
        assert result(sent) == 1
        assert requeues(site) == 0
        assert site.effects(order) == 1


def test_g13_a_quorum_queue_returns_what_may_not_be_published(
    redis, rabbit_server, reader, tmp_path, order
):
    names = (f"qa-{order}", f"qb-{order}")
    queues = in_one_exchange(*names, **{"x-queue-type": "quorum", "x-delivery-limit": 6})
    with site_of(redis, rabbit_server, reader, tmp_path, **queues) as site:
        place = site.place()
        site.worker("prefork", 2, "-Q", ",".join(names))
        rabbit_server.control("set_permissions", "reader", ".*", "^$", ".*")
        try:
            hold(site, order)
            sent = send(site, order, place, names[0])
            eventually(lambda: given_back(site) >= 2, why="it was given back")
            let_go(site, order)
            assert result(sent) == 1
        finally:
            rabbit_server.control("set_permissions", "reader", ".*", BUT_DEFAULT, ".*")
        assert site.effects(order) == 1


def test_a_worker_with_the_right_logs_nothing(redis, rabbit_server, tmp_path, order):
    with site_of(redis, rabbit_server, rabbit_server.url, tmp_path) as site:
        worker = site.worker("prefork", 1, "-Q", f"right-{order}")
        sent = send(site, order, site.place(), f"right-{order}")
        assert result(sent) == 1
        assert AT_START not in worker.output
