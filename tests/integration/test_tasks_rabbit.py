"""Tasks with messages from RabbitMQ: redelivered, requeued, cut off, and failed for good."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import chain
from kombu import Connection

from django_dlock import AttemptsExhausted
from django_dlock.celery.publishing.requeue import confirming
from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.integration.test_tasks_faults import hold, let_go, requeues, result
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, Site, eventually, orders

pytestmark = pytest.mark.extended

QUEUES = ("celery", "prefork", "solo")
QUEUE_TYPES = ("classic", "quorum")


@pytest.fixture(scope="module")
def reading(rabbit_server: RabbitServer) -> Iterator[Proxy]:
    """Between RabbitMQ and the workers' consumers."""
    with Connection(rabbit_server.url) as connection:
        for queue in QUEUES:
            connection.SimpleQueue(queue).clear()
    with Proxy("127.0.0.1", rabbit_server.port, speaks="amqp") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def writing(rabbit_server: RabbitServer) -> Iterator[Proxy]:
    """Between RabbitMQ and the messages that the workers publish."""
    with Proxy("127.0.0.1", rabbit_server.port, speaks="amqp") as proxy:
        yield proxy


def url(port: int) -> str:
    return f"amqp://guest:guest@127.0.0.1:{port}//"


@pytest.fixture(scope="module")
def site(
    redis: RedisServer,
    rabbit_server: RabbitServer,
    reading: Proxy,
    writing: Proxy,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """A prefork worker on RabbitMQ; the tests connect to RabbitMQ directly."""
    settings = {
        "CELERY_BROKER_READ_URL": url(reading.port),
        "CELERY_BROKER_WRITE_URL": url(writing.port),
    }
    directory = tmp_path_factory.mktemp("rabbit")
    with Site(redis, directory, broker=rabbit_server.url, settings=settings) as site:
        site.worker("prefork")
        yield site


def said(site: Site, what: str) -> int:
    """How often the workers logged this."""
    return sum(worker.output.count(what) for worker in site.workers)


def idle(site: Site) -> bool:
    """No message is ready or unacknowledged, and none returns when the consumers have left."""
    with site.app.connection_for_read() as connection:
        return all(
            connection.default_channel.queue_declare(queue, passive=True).message_count == 0
            for queue in QUEUES[:2]
        )


def test_g12_a_copy_that_arrives_during_the_original_run_waits_for_its_result(
    site, reading, place, order
):
    """RabbitMQ at once redelivers the unacknowledged messages of a broken connection."""
    before = requeues(site)
    sent = site.send("charge", order, str(place), "go", queue="prefork")
    place.wait(f"began-{order}")
    reading.cut()
    eventually(lambda: requeues(site) > before, why="the copy met the original")
    place.open("go")
    assert result(sent) == 1
    eventually(lambda: said(site, f"[{sent.id}] is a duplicate"), why="the copy ended")
    assert len(place.lines(f"began-{order}")) == site.effects(order) == 1


def test_g12_a_copy_of_a_finished_run_whose_acknowledgement_was_lost_gets_its_result(
    site, reading, place, order
):
    sent = site.send("charge", order, str(place), "go", queue="prefork")
    place.wait(f"began-{order}")
    reading.black_hole()
    place.open("go")
    assert result(sent) == 1
    reading.heal()
    eventually(lambda: said(site, f"[{sent.id}] is a duplicate"), why="the copy ended")
    assert sent.get() == 1
    assert len(place.lines(f"began-{order}")) == site.effects(order) == 1


def test_a_requeued_message_is_the_same_message(site, place, order):
    hold(site, order)
    before = requeues(site)
    first = site.app.signature(
        "tests.support.tasks_app.tells",
        (order, str(place)),
        queue="prefork",
        countdown=0.2,
        priority=7,
        expires=3600,
        time_limit=90,
        soft_time_limit=80,
        headers={"mine": "kept"},
    )
    collect = site.app.signature("tests.support.tasks_app.collect", (str(place), order))
    sent = chain(first, collect).apply_async()
    eventually(lambda: requeues(site) >= before + 2)
    assert sent.parent.state == "RETRY"
    let_go(site, order)
    assert result(sent) == order
    told = json.loads(place.wait(f"told-{order}")[0])
    expires = told.pop("expires")
    assert expires is not None
    assert told == {
        "id": sent.parent.id,
        "correlation_id": sent.parent.id,
        "priority": 7,
        "retries": 0,
        "root": sent.parent.id,
        "parent": None,
        "mine": "kept",
        "limits": [90, 80],
    }
    assert place.lines(f"collected-{order}") == [str(order)]


def test_g13_a_message_that_cannot_be_published_again_is_returned(site, writing, place, order):
    hold(site, order)
    writing.refuse()
    try:
        sent = site.send("charge", order, str(place), queue="prefork")
        eventually(lambda: said(site, f"[{sent.id}] could not be requeued"))
    finally:
        writing.accept()
    let_go(site, order)
    assert result(sent) == 1
    assert site.effects(order) == 1


def test_g13_a_message_lost_in_a_dying_connection_is_not_acknowledged(site, writing, place, order):
    """The old message is acknowledged on another connection, which still works."""
    hold(site, order)
    before = requeues(site)
    sent = site.send("charge", order, str(place), queue="prefork")
    eventually(lambda: requeues(site) > before, why="the child is connected")
    seen = writing.swallowed
    writing.black_hole()
    before = requeues(site)
    writing.wait_until(lambda proxy: proxy.swallowed > seen, PATIENCE)
    writing.heal()
    eventually(lambda: requeues(site) > before, why="it is published again")
    let_go(site, order)
    assert result(sent) == 1
    assert site.effects(order) == 1


def test_after_an_unconfirmed_publish_the_channel_is_closed(site):
    """A late confirmation would be mistaken for that of the next message."""
    channels = []

    def publish(error: type[BaseException] | None = None) -> None:
        with confirming(site.app) as publishing:
            channels.append(publishing["producer"].channel)
            if error is not None:
                raise error

    publish()
    with pytest.raises(TimeoutError):
        publish(TimeoutError)
    assert not channels[1].is_open
    publish()
    assert channels[2].is_open


def test_g13_a_retry_lost_in_a_dying_connection_does_not_count_as_published(
    site, writing, place, order
):
    sent = site.send("ends", order, str(place), "swallowed", queue="prefork")
    place.wait(f"connected-{order}")
    seen = writing.swallowed
    writing.black_hole()
    place.open("go")
    writing.wait_until(lambda proxy: proxy.swallowed > seen, PATIENCE)
    writing.heal()
    assert result(sent) == 2
    assert site.effects(order) == 1


def test_g13_a_task_that_always_dies_fails_after_max_attempts(site, place, order):
    sent = site.send("killed", order, str(place), queue="prefork")
    with pytest.raises(AttemptsExhausted, match="2 runs"):
        result(sent)
    assert len(place.lines(f"began-{order}")) == 2
    assert site.effects(order) == 0
    eventually(lambda: idle(site))


def test_g13_a_time_limit_that_ends_in_a_cold_shutdown_loses_nothing(
    redis, rabbit_server, tmp_path, order
):
    """Celery acknowledges such a message and reports the limit to nobody."""
    with Site(redis, tmp_path, broker=rabbit_server.url) as site:
        place = site.place()
        first = site.worker("prefork", 1, "-Q", "cold")
        sent = site.send("charge", order, str(place), "never", queue="cold", time_limit=1)
        place.wait(f"began-{order}")
        first.process.send_signal(signal.SIGQUIT)
        first.process.wait(PATIENCE)
        assert site.effects(order) == 0
        site.worker("prefork", 1, "-Q", "cold")
        assert result(sent) == 2
        assert site.effects(order) == 1


def test_g13_a_message_of_a_quorum_queue_is_requeued_for_whole_seconds(
    redis, rabbit_server, tmp_path, order
):
    """RabbitMQ, not a worker, delays the message; then it returns to its old queue."""
    queues = {
        name: {
            "exchange": "tasks",
            "exchange_type": "topic",
            "routing_key": f"tasks.{name}",
            "queue_arguments": {"x-queue-type": "quorum"},
        }
        for name in ("usual", "quorum")
    }
    settings = {"CELERY_TASK_QUEUES": queues, "CELERY_TASK_DEFAULT_QUEUE": "usual"}
    with Site(redis, tmp_path, broker=rabbit_server.url, settings=settings) as site:
        for name, value in settings.items():
            site.app.conf[name.removeprefix("CELERY_").lower()] = value
        with site.app.connection_for_write() as connection:
            for queue in site.app.amqp.queues.values():
                queue(connection).declare()
        place = site.place()
        worker = site.worker("solo", 1, "-Q", "quorum")
        hold(site, order)
        sent = site.send("charge", order, str(place), queue="quorum")
        eventually(lambda: requeues(site) >= 2)
        let_go(site, order)
        assert result(sent) == 1
        assert "could not be requeued" not in worker.output
        assert site.effects(order) == 1


@pytest.fixture
def impatient_rabbit() -> Iterator[RabbitServer]:
    try:
        with RabbitServer(consumer_timeout=3, channel_tick_interval=0.5) as server:
            yield server
    except (ServerNotFound, RuntimeError) as error:
        missing(str(error))


def test_g12_a_body_longer_than_the_consumer_timeout_does_not_run_twice_at_once(
    redis, impatient_rabbit, tmp_path, order
):
    """RabbitMQ closes the channel and redelivers; the worker opens a new channel."""
    settings = {"CELERY_BROKER_CHANNEL_ERROR_RETRY": True}
    # So a copy is requeued for half a second at most, which is less than this RabbitMQ waits for
    # acknowledgements.
    transport = {"visibility_timeout": 2}
    with Site(
        redis, tmp_path, broker=impatient_rabbit.url, settings=settings, transport=transport
    ) as site:
        place = site.place()
        worker = site.worker("prefork", 3)
        sent = site.send("charge", order, str(place), "go", queue="prefork")
        place.wait(f"began-{order}")
        eventually(lambda: requeues(site) >= 1, why="the copy met the original")
        assert "PRECONDITION_FAILED" in worker.output
        other = next(orders)
        assert result(site.send("tells", other, str(place), queue="prefork")) == other
        place.open("go")
        assert result(sent) == 1
        eventually(lambda: said(site, f"[{sent.id}] is a duplicate"), why="the copy ended")
        assert len(place.lines(f"began-{order}")) == site.effects(order) == 1


def queues_of(kind: str, *names: str, exchange: str, **arguments: object) -> dict[str, object]:
    """``task_queues`` of one exchange that all have its key ``both``."""
    entry = {
        "exchange": exchange,
        "exchange_type": kind,
        "routing_key": "both",
        "queue_arguments": arguments,
    }
    return {"other": {}, **{f"{exchange}.{name}": entry for name in names}}


@contextmanager
def site_with(
    redis: RedisServer, broker: str, directory: Path, queues: dict[str, object], **settings: Any
) -> Iterator[Site]:
    """A site with these queues, which are declared at the broker."""
    settings = {"task_queues": queues, "task_default_queue": "other", **settings}
    workers = {f"CELERY_{name.upper()}": value for name, value in settings.items()}
    with Site(redis, directory, broker=broker, settings=workers) as site:
        for name in ("task_queues", "task_default_queue"):
            site.app.conf[name] = settings[name]
        with site.app.connection_for_write() as connection:
            for queue in site.app.amqp.queues.values():
                queue(connection).declare()
        yield site


def left_in(site: Site, *queues: str) -> list[int]:
    """How many messages are ready in each queue."""
    with site.app.connection_for_read() as connection:
        channel = connection.default_channel
        return [channel.queue_declare(name, passive=True).message_count for name in queues]


@pytest.mark.parametrize(
    "kind", [f"{kind} {queue}" for kind in ("fanout", "topic", "direct") for queue in QUEUE_TYPES]
)
def test_g13_a_requeue_through_an_exchange_of_two_queues_makes_no_third_message(
    redis, rabbit_server, tmp_path, order, kind
):
    kind, queue_type = kind.split()
    exchange = f"news-{kind}-{queue_type}"
    queues = queues_of(kind, "a", "b.c", exchange=exchange, **{"x-queue-type": queue_type})
    names = [f"{exchange}.a", f"{exchange}.b.c"]
    with site_with(redis, rabbit_server.url, tmp_path, queues) as site:
        place = site.place()
        workers = [site.worker("prefork", 1, "-Q", name) for name in names]
        hold(site, order)
        site.app.send_task(
            "tests.support.tasks_app.locked",
            (order, str(place)),
            exchange=exchange,
            routing_key="both",
        )
        eventually(lambda: requeues(site) >= 5, why="both copies were requeued")
        let_go(site, order)
        place.wait(f"ended-{order}", 2)
        for worker in workers:
            worker.stop(PATIENCE)
        assert left_in(site, *names) == [0, 0]
        assert len(place.lines(f"began-{order}")) == 2
        assert "could not be requeued" not in "".join(worker.output for worker in workers)


def test_messages_requeued_to_a_direct_exchange_of_quorum_queues_do_not_block_others(
    redis, rabbit_server, tmp_path, order
):
    """A worker that kept them until they are due could not fetch other messages."""
    queues = queues_of("direct", "all", exchange="straight", **{"x-queue-type": "quorum"})
    with site_with(redis, rabbit_server.url, tmp_path, queues) as site:
        place = site.place()
        worker = site.worker("solo", 1, "-Q", "straight.all")
        hold(site, order)
        to = {"queue": "straight.all"}
        sent = [site.send("locked", order, str(place), **to) for _ in range(4)]
        eventually(lambda: requeues(site) >= 8, why="each was requeued twice")
        pinged = [site.send("collect", n, str(place), order, **to) for n in range(3)]
        assert [result(each) for each in pinged] == [0, 1, 2]
        let_go(site, order)
        assert sorted(str(result(each)) for each in sent) == ["1", "2", "3", "4"]
        # For an ETA, which a worker waits for, Celery logs this.
        assert "are not supported with native" not in worker.output
        assert "could not be requeued" not in worker.output


def test_g13_a_quorum_queue_drops_no_message_that_cannot_be_requeued(
    redis, rabbit_server, writing, tmp_path, order
):
    """Publishing is blocked but consuming is not; each return of the message is counted."""
    limited = {"x-queue-type": "quorum", "x-delivery-limit": 1}
    queues = queues_of("direct", "all", exchange="counting", **limited)
    urls = {"broker_read_url": rabbit_server.url, "broker_write_url": url(writing.port)}
    with site_with(redis, rabbit_server.url, tmp_path, queues, **urls) as site:
        place = site.place()
        site.worker("prefork", 1, "-Q", "counting.all")
        hold(site, order)
        writing.refuse()
        try:
            sent = site.send("charge", order, str(place), queue="counting.all")
            eventually(lambda: said(site, f"[{sent.id}] could not be requeued") >= 6)
        finally:
            writing.accept()
        let_go(site, order)
        assert result(sent) == 1
        assert site.effects(order) == 1


def test_g13_a_worker_that_stops_returns_messages_it_cannot_requeue(
    redis, rabbit_server, writing, tmp_path, order
):
    """Its children try as long as the broker is blocked, but they do not delay the shutdown."""
    urls = {"broker_read_url": rabbit_server.url, "broker_write_url": url(writing.port)}
    queues = queues_of("direct", "all", exchange="ending")
    with site_with(redis, rabbit_server.url, tmp_path, queues, **urls) as site:
        place = site.place()
        worker = site.worker("prefork", 1, "-Q", "ending.all")
        hold(site, order)
        writing.refuse()
        try:
            sent = site.send("charge", order, str(place), queue="ending.all")
            eventually(lambda: said(site, f"[{sent.id}] could not be requeued") >= 2)
            worker.process.terminate()
            worker.process.wait(PATIENCE)
        finally:
            writing.accept()
        assert left_in(site, "ending.all") == [1]
        let_go(site, order)
        site.worker("prefork", 1, "-Q", "ending.all")
        assert result(sent) == 1
