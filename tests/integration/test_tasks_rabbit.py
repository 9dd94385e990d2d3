"""Tasks whose messages come from RabbitMQ: redelivered, put back, cut off, given up."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from celery import chain
from kombu import Connection

from django_dlock import AttemptsExhausted
from django_dlock.celery.requeue import confirming
from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.integration.test_tasks_faults import hold, let_go, put_back, result
from tests.proxy import Proxy
from tests.workers import Site, eventually, orders

QUEUES = ("celery", "prefork", "solo")


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
    """Between RabbitMQ and what the workers publish."""
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
    """A prefork worker on RabbitMQ; the tests themselves go straight to it."""
    settings = {
        "CELERY_BROKER_READ_URL": url(reading.port),
        "CELERY_BROKER_WRITE_URL": url(writing.port),
    }
    directory = tmp_path_factory.mktemp("rabbit")
    with Site(redis, directory, broker=rabbit_server.url, settings=settings) as site:
        site.worker("prefork")
        yield site


def said(site: Site, what: str) -> int:
    """How often workers wrote this into their logs."""
    return sum(worker.output.count(what) for worker in site.workers)


def idle(site: Site) -> bool:
    """No message is ready or unacknowledged: none appears when the queues' consumers are gone."""
    with site.app.connection_for_read() as connection:
        return all(
            connection.default_channel.queue_declare(queue, passive=True).message_count == 0
            for queue in QUEUES[:2]
        )


def test_g12_a_copy_that_comes_while_the_original_lives_waits_for_its_result(
    site, reading, place, order
):
    """RabbitMQ delivers again at once what a broken connection left unacknowledged."""
    before = put_back(site)
    sent = site.send("charge", order, str(place), "go", queue="prefork")
    place.wait(f"began-{order}")
    reading.cut()
    eventually(lambda: put_back(site) > before, why="the copy met the original")
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


def test_a_message_put_back_is_the_same_message(site, place, order):
    hold(site, order)
    before = put_back(site)
    first = site.app.signature(
        "tests.tasks_app.tells",
        (order, str(place)),
        queue="prefork",
        countdown=0.2,
        priority=7,
        expires=3600,
        time_limit=90,
        soft_time_limit=80,
        headers={"mine": "kept"},
    )
    collect = site.app.signature("tests.tasks_app.collect", (str(place), order))
    sent = chain(first, collect).apply_async()
    eventually(lambda: put_back(site) >= before + 2)
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


def test_g13_a_message_that_cannot_be_published_again_goes_back(site, writing, place, order):
    hold(site, order)
    writing.refuse()
    try:
        sent = site.send("charge", order, str(place), queue="prefork")
        eventually(lambda: said(site, f"[{sent.id}] could not be put back"))
    finally:
        writing.accept()
    let_go(site, order)
    assert result(sent) == 1
    assert site.effects(order) == 1


def test_g13_a_message_swallowed_by_a_dying_connection_is_not_acknowledged(
    site, writing, place, order
):
    """The old one is acknowledged on another connection, which is alive."""
    hold(site, order)
    before = put_back(site)
    sent = site.send("charge", order, str(place), queue="prefork")
    eventually(lambda: put_back(site) > before, why="the child is connected")
    writing.black_hole()
    before = put_back(site)
    seen = writing.swallowed
    writing.wait_until(lambda proxy: proxy.swallowed > seen)
    writing.heal()
    eventually(lambda: put_back(site) > before, why="it is published again")
    let_go(site, order)
    assert result(sent) == 1
    assert site.effects(order) == 1


def test_a_publish_that_was_not_confirmed_takes_its_channel_with_it(site):
    """A confirmation that comes late would pass for that of the next message."""
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


def test_g13_a_retry_swallowed_by_a_dying_connection_does_not_count_as_published(
    site, writing, place, order
):
    sent = site.send("ends", order, str(place), "swallowed", queue="prefork")
    place.wait(f"connected-{order}")
    seen = writing.swallowed
    writing.black_hole()
    place.open("go")
    writing.wait_until(lambda proxy: proxy.swallowed > seen)
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
    """Celery acknowledges such a message, and tells nobody of the limit."""
    with Site(redis, tmp_path, broker=rabbit_server.url) as site:
        place = site.place()
        first = site.worker("prefork", 1, "-Q", "cold")
        sent = site.send("charge", order, str(place), "never", queue="cold", time_limit=1)
        place.wait(f"began-{order}")
        first.process.send_signal(signal.SIGQUIT)
        first.process.wait(30)
        assert site.effects(order) == 0
        site.worker("prefork", 1, "-Q", "cold")
        assert result(sent) == 2
        assert site.effects(order) == 1


def test_g13_a_message_of_a_quorum_queue_is_put_back_for_whole_seconds(
    redis, rabbit_server, tmp_path, order
):
    """RabbitMQ keeps it for that long, and no worker does. Then it is where it was before."""
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
        eventually(lambda: put_back(site) >= 2)
        let_go(site, order)
        assert result(sent) == 1
        assert "could not be put back" not in worker.output
        assert site.effects(order) == 1


@pytest.fixture
def impatient_rabbit() -> Iterator[RabbitServer]:
    try:
        with RabbitServer(consumer_timeout=3, channel_tick_interval=0.5) as server:
            yield server
    except (ServerNotFound, RuntimeError) as error:
        missing(str(error))


def test_g12_a_body_longer_than_the_consumer_timeout_is_not_run_beside_itself(
    redis, impatient_rabbit, tmp_path, order
):
    """RabbitMQ closes the channel and delivers again; the worker opens a new one."""
    settings = {"CELERY_BROKER_CHANNEL_ERROR_RETRY": True}
    # So that a copy is put back for half a second at the most, and not for longer than this
    # RabbitMQ waits for acknowledgements.
    transport = {"visibility_timeout": 2}
    with Site(
        redis, tmp_path, broker=impatient_rabbit.url, settings=settings, transport=transport
    ) as site:
        place = site.place()
        worker = site.worker("prefork", 3)
        sent = site.send("charge", order, str(place), "go", queue="prefork")
        place.wait(f"began-{order}")
        eventually(lambda: put_back(site) >= 1, why="the copy met the original")
        assert "PRECONDITION_FAILED" in worker.output
        other = next(orders)
        assert result(site.send("tells", other, str(place), queue="prefork")) == other
        place.open("go")
        assert result(sent) == 1
        eventually(lambda: said(site, f"[{sent.id}] is a duplicate"), why="the copy ended")
        assert len(place.lines(f"began-{order}")) == site.effects(order) == 1
