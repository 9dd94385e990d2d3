"""Contended messages of exchanges that the worker's settings do not name go back to their queue."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Exchange, Queue

from testproject.servers import RedisServer
from tests.integration.test_tasks_faults import hold, let_go, requeues
from tests.support.workers import Place, Site, Worker, eventually, result

pytestmark = pytest.mark.extended

HAS_GEVENT = importlib.util.find_spec("gevent") is not None
no_gevent = pytest.mark.skipif(not HAS_GEVENT, reason="gevent is not installed: there is no wheel")
POOLS = ["prefork", "threads", "solo", pytest.param("gevent", marks=no_gevent)]
KINDS = ["direct", "topic", "fanout", "headers"]


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def site(
    request: pytest.FixtureRequest,
    redis: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    options: dict[str, Any] = {"transport": {"global_keyprefix": "shop:"}}
    if request.param == "rabbitmq":
        options = {"broker": request.getfixturevalue("rabbit_server").url}
    directory = tmp_path_factory.mktemp("foreign")
    with Site(redis, directory, **options) as site:
        yield site
        for worker in site.workers:
            # Under gevent, Celery takes seconds to shut down.
            worker.kill()


@pytest.fixture
def name(site: Site, order: int) -> str:
    """Of exchange and queue; no other test uses it."""
    return f"foreign-{site.app.connection().transport.driver_type}-{order}"


def bind(site: Site, exchange: str, kind: str, *queues: str) -> None:
    """As another application does."""
    with site.app.connection_for_write() as connection:
        for queue in queues:
            source = Exchange(exchange, kind)
            binding = {"x-match": "any", "kind": "any"} if kind == "headers" else None
            # On Redis, only the type of a declared exchange says that a key is a pattern.
            key = "orders.#" if kind == "topic" else "orders.new"
            bound = Queue(queue, source, routing_key=key, binding_arguments=binding)
            bound(connection.default_channel).declare()


def contended(
    site: Site, place: Place, order: int, exchange: str, kind: str, **options: Any
) -> None:
    """A contended message is requeued until it can run, and runs once."""
    before = requeues(site)
    hold(site, order)
    sent = site.send(
        "charge",
        order,
        str(place),
        exchange=exchange,
        routing_key="orders.new",
        headers={"kind": "any"},
        # Kombu's own exchanges are only known to those who declare them.
        declare=[Exchange(exchange, kind)],
        **options,
    )
    eventually(lambda: requeues(site) >= before + 2, why="it was requeued twice")
    let_go(site, order)
    assert result(sent) == 1
    assert len(place.lines(f"began-{order}")) == site.effects(order) == 1


def refused(site: Site) -> bool:
    return any("cannot be requeued" in worker.output for worker in site.workers)


@pytest.mark.parametrize("pool", POOLS)
def test_g13_a_message_of_another_applications_exchange_is_requeued(site, place, order, name, pool):
    bind(site, name, "topic", f"{name}-q")
    worker = site.worker(pool, 1, "-Q", f"{name}-q")
    contended(site, place, order, name, "topic", priority=3)
    assert not refused(site)
    worker.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_g13_a_worker_of_several_queues_requeues_to_the_one_it_came_from(
    site, place, order, name, kind
):
    if "redis" in name and kind in ("headers", "fanout"):
        pytest.skip("Redis has no such exchange, or keeps its messages in no queue")
    bind(site, name, kind, f"{name}-q")
    worker = site.worker("prefork", 2, "-Q", f"{name}-a,{name}-q")
    contended(site, place, order, name, kind)
    assert not refused(site)
    worker.kill()


def test_g13_queues_that_a_worker_got_at_run_time_keep_their_messages(site, place, order, name):
    worker: Worker = site.worker("prefork", 2, "-Q", f"{name}-a")
    kind = "fanout" if "redis" in name else "topic"
    options = {"exchange": name, "exchange_type": kind, "routing_key": "orders.new"}
    eventually(
        lambda: site.app.control.add_consumer(f"{name}-q", **options, reply=True, timeout=1),
        why="the worker answered",
    )
    contended(site, place, order, name, kind)
    assert not refused(site)
    worker.kill()
