"""Messages that arrive again, late or early, and databases that disappear; on real workers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from kombu import Connection

from django_dlock import AttemptsExhausted
from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer
from tests.conftest import missing
from tests.integration.test_tasks_faults import hold, let_go, requeues, result
from tests.support import postgres
from tests.support.proxy import Protocol, Proxy
from tests.support.workers import Site, eventually


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """URL of a PostgreSQL."""
    try:
        with postgres.database() as url:
            yield url
    except postgres.PostgresNotFound as error:
        missing(str(error))


@pytest.fixture(scope="module")
def writing(redis: RedisServer) -> Iterator[Proxy]:
    """Between the broker and the messages that workers publish."""
    with Proxy("127.0.0.1", redis.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def querying(database: str) -> Iterator[Proxy]:
    """Between the database and the workers."""
    address = urlsplit(database)
    with Proxy(address.hostname, address.port, speaks="postgres") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def site(
    redis: RedisServer,
    database: str,
    writing: Proxy,
    querying: Proxy,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    """A prefork worker; the tests connect directly to broker and database."""
    settings = {"CELERY_BROKER_WRITE_URL": writing.url}
    directory = tmp_path_factory.mktemp("deliveries")
    with Site(redis, directory, postgres=database, settings=settings) as site:
        address = urlsplit(database)
        netloc = f"{address.username}@127.0.0.1:{querying.port}"
        site.env["TASKS_POSTGRES"] = address._replace(netloc=netloc).geturl()
        site.worker("prefork")
        yield site


def said(site: Site, what: str) -> int:
    """How often the workers logged this."""
    return sum(worker.output.count(what) for worker in site.workers)


def state(site: Site, task_id: str) -> str:
    """The current state of the result; a result object keeps the first final state that it sees."""
    return str(site.app.AsyncResult(task_id).state)


# -- messages --------------------------------------------------------------------------


def test_g12_copies_of_a_message_with_a_countdown_run_once(site, place, order):
    """Redis redelivers a message that waits in a worker longer than the visibility timeout."""
    sent = site.send("charge", order, str(place), queue="prefork", countdown=4)
    eventually(lambda: said(site, f"[{sent.id}] received") == 1)
    site.redeliver()
    eventually(lambda: said(site, f"[{sent.id}] received") == 2)
    site.redeliver()
    assert place.lines(f"began-{order}") == []
    assert result(sent) == 1
    eventually(lambda: said(site, f"[{sent.id}] succeeded") == 3, why="all copies ended")
    assert len(place.lines(f"began-{order}")) == site.effects(order) == 1
    assert sent.get() == 1


def test_a_copy_that_arrives_after_the_expiry_does_not_change_the_result(site, place, order):
    """The original began before it expired."""
    sent = site.send("charge", order, str(place), "go", queue="prefork", expires=2.5)
    place.wait(f"began-{order}")
    site.redeliver()
    discarded = f"Discarding revoked task: tests.support.tasks_app.charge[{sent.id}]"
    eventually(lambda: said(site, discarded))
    place.open("go")
    eventually(lambda: state(site, sent.id) == "SUCCESS", why="the original sets the final state")
    site.send("charge", order, str(place), task_id=sent.id, queue="prefork", expires=-1)
    eventually(lambda: said(site, discarded) == 2)
    assert state(site, sent.id) == "SUCCESS"
    assert len(place.lines(f"began-{order}")) == site.effects(order) == 1


def test_g13_a_message_that_cannot_be_published_again_is_returned(site, writing, place, order):
    hold(site, order)
    writing.refuse()
    try:
        sent = site.send("charge", order, str(place), queue="prefork")
        eventually(lambda: said(site, f"[{sent.id}] could not be requeued"))
    finally:
        writing.accept()
    let_go(site, order)
    site.redeliver()
    assert result(sent) == 1
    assert site.effects(order) == 1


@pytest.fixture(params=["redis", "rabbit_server"])
def broker(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """A proxy in front of a broker."""
    server: RedisServer | RabbitServer = request.getfixturevalue(request.param)
    speaks: Protocol = "redis" if isinstance(server, RedisServer) else "amqp"
    with Proxy("127.0.0.1", server.port, speaks=speaks) as proxy:
        with Connection(broker_url(proxy)) as connection:
            connection.SimpleQueue("solo").clear()
        yield proxy


def broker_url(proxy: Proxy) -> str:
    return proxy.url if proxy.speaks == "redis" else f"amqp://guest:guest@127.0.0.1:{proxy.port}//"


def test_g12_a_worker_stopped_past_its_ttl_and_resumed_counts_once(
    broker, redis, database, tmp_path, order
):
    """The broker considers it dead, but it is alive."""
    with Site(redis, tmp_path, broker=broker_url(broker), postgres=database) as site:
        place = site.place()
        stopped = site.worker("solo", 1)
        sent = site.send("charge", order, str(place), "go", queue="solo")
        place.wait(f"began-{order}")
        os.killpg(stopped.process.pid, signal.SIGSTOP)
        try:
            eventually(lambda: site.lease(order) is None)
            broker.cut()
            if broker.speaks == "redis":
                site.redeliver()
            site.worker("solo", 1)
            assert result(sent) == 2
        finally:
            os.killpg(stopped.process.pid, signal.SIGCONT)
        eventually(lambda: "is requeued" in stopped.output, why="the late run is requeued")
        assert site.effects(order) == 1
        assert site.record(order)[:2] == ("succeeded", 2)


# -- the database ----------------------------------------------------------------------


def test_g13_without_the_database_at_the_claim_tasks_are_requeued_with_growing_delays(
    site, querying, place, order
):
    querying.refuse()
    try:
        sent = site.send("charge", order, str(place), queue="prefork")
        eventually(lambda: said(site, f"[{sent.id}] is requeued") >= 3)
    finally:
        querying.accept()
    assert result(sent) == 1
    assert site.effects(order) == 1
    assert site.record(order) == ("succeeded", 1, 0)
    log = site.workers[0].output
    delays = [
        float(each)
        for each in re.findall(rf"{sent.id}\] is requeued with a delay of ([0-9.]+)", log)
    ]
    assert delays == sorted(delays)


def test_g13_a_database_connection_cut_in_the_middle_of_the_body_runs_the_task_again(
    site, querying, place, order
):
    sent = site.send("late", order, str(place), "go", queue="prefork")
    place.wait(f"began-{order}")
    querying.cut()
    place.open("go")
    assert result(sent) == 2
    assert site.effects(order) == 1
    assert site.record(order)[:2] == ("succeeded", 2)


def test_a_body_that_always_breaks_its_connection_fails_after_max_attempts(site, place, order):
    sent = site.send("late", order, str(place), "broken", queue="prefork")
    with pytest.raises(AttemptsExhausted, match="2 runs"):
        result(sent)
    assert len(place.lines(f"began-{order}")) == 2


def test_g12_g13_a_database_connection_cut_before_the_completion_runs_the_task_again(
    site, querying, place, order
):
    sent = site.send("charge", order, str(place), "go", queue="prefork")
    place.wait(f"wrote-{order}")
    querying.cut()
    place.open("go")
    assert result(sent) == 2
    assert len(place.lines(f"ended-{order}")) == 2
    assert site.effects(order) == 1
    assert site.record(order)[:2] == ("succeeded", 2)


def test_g12_a_commit_whose_reply_is_lost_is_found_and_the_task_not_run_again(
    site, querying, place, order
):
    sent = site.send("charge", order, str(place), "go", queue="prefork")
    place.wait(f"began-{order}")
    querying.drop_replies(of=("COMMIT",))
    place.open("go")
    assert result(sent) == 1
    assert querying.replies_dropped == 1
    assert len(place.lines(f"began-{order}")) == site.effects(order) == 1
    assert site.record(order) == ("succeeded", 1, 0)


def test_g13_a_run_waits_for_a_database_that_is_unreachable_at_the_completion(
    site, querying, place, order
):
    sent = site.send("charge", order, str(place), "go", queue="prefork")
    place.wait(f"began-{order}")
    before = requeues(site)
    querying.refuse()
    try:
        place.open("go")
        eventually(lambda: requeues(site) >= before + 2)
    finally:
        querying.accept()
    assert result(sent) == 2
    assert site.effects(order) == 1
    # Nobody could record how the first run ended, so it counts as died.
    assert site.record(order) == ("succeeded", 2, 0)
