"""Workers end in every possible way; locks are released, and messages are redelivered.

The TTL is half a minute, so a lock that is free here has been released.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery.result import AsyncResult
from django.core.management import call_command
from django.test import override_settings

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.workers import PATIENCE, Place, Site, Worker, eventually, orders, result

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        with RedisServer() as redis:
            settings = {"DLOCKS": {"default": alias(redis)}}
            with Site(
                redis,
                tmp_path_factory.mktemp("shutdown"),
                settings=settings,
                tasks="tests.support.tasks_dying",
            ) as site:
                yield site
    except ServerNotFound as error:
        missing(str(error))


def alias(redis: RedisServer) -> dict[str, Any]:
    return {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": redis.url,
        "TTL": 30.0,
        "OPTIONS": {"command_timeout": 5.0},
    }


@pytest.fixture
def place(site: Site) -> Iterator[Place]:
    yield site.place()
    for worker in site.workers:
        worker.stop()


def worker(site: Site, concurrency: int = 1, **settings: Any) -> Worker:
    """A new worker with additional Celery settings."""
    common = site.env["TASKS_SETTINGS"]
    of_celery = {f"CELERY_{name.upper()}": value for name, value in settings.items()}
    site.env["TASKS_SETTINGS"] = json.dumps(json.loads(common) | of_celery)
    try:
        return site.worker("prefork", concurrency)
    finally:
        site.env["TASKS_SETTINGS"] = common


def begun(place: Place, order: int) -> int:
    """The process of a body that has begun."""
    return int(place.wait(f"began-{order}")[0].split()[1])


def ended(worker: Worker) -> int:
    return worker.process.wait(timeout=PATIENCE)


def queued(site: Site) -> tuple[int, int]:
    """How many messages wait, and how many are unacknowledged."""
    with site.app.connection_for_read() as connection:
        client = connection.default_channel.client
        return client.llen("celery"), client.hlen("unacked")


def proven_by_others(site: Site) -> int:
    """How often another process found a holder dead."""
    return sum(worker.output.count("its holder is dead") for worker in site.workers)


def runs_again(site: Site, sent: AsyncResult, order: int) -> None:
    """The lock is free, the message waits, and another worker makes the only effect."""
    assert site.lease(order) is None
    assert queued(site) == (1, 0)
    proven = proven_by_others(site)
    worker(site)
    assert result(sent) == 2
    assert site.effects(order) == 1
    assert proven_by_others(site) == proven


def test_a_warm_shutdown_lets_the_body_end(site, place, order):
    first = worker(site)
    sent = site.send("charge", order, str(place), "go")
    begun(place, order)
    first.process.terminate()
    eventually(lambda: "Warm shutdown" in first.output)
    assert site.lease(order) is not None
    place.open("go")
    assert ended(first) == 0
    assert result(sent) == 1
    assert site.lease(order) is None
    assert queued(site) == (0, 0)
    assert site.effects(order) == 1


def test_a_child_that_dies_in_a_warm_shutdown_leaves_no_lock_and_no_message_behind(
    site, place, order
):
    first = worker(site)
    sent = site.send("charge", order, str(place), "never")
    child = begun(place, order)
    first.process.terminate()
    eventually(lambda: "Warm shutdown" in first.output)
    os.kill(child, signal.SIGKILL)
    ended(first)
    runs_again(site, sent, order)


def test_a_cold_shutdown_releases_locks_and_messages(site, place, order):
    first = worker(site)
    sent = site.send("charge", order, str(place), "never")
    begun(place, order)
    first.process.send_signal(signal.SIGQUIT)
    ended(first)
    # The body ended by an exception, which does not count as a death.
    assert site.record(order) == ("waiting", 1, 0)
    runs_again(site, sent, order)


def test_a_warm_shutdown_that_becomes_cold_releases_locks_and_messages(site, place, order):
    first = worker(site)
    sent = site.send("charge", order, str(place), "never")
    begun(place, order)
    first.process.terminate()
    eventually(lambda: "Warm shutdown" in first.output)
    first.process.send_signal(signal.SIGQUIT)
    ended(first)
    runs_again(site, sent, order)


def test_a_soft_shutdown_lets_short_bodies_end_and_releases_the_rest(site, place, order):
    short = next(orders)
    first = worker(site, 2, worker_soft_shutdown_timeout=1.5)
    ends = site.send("idles", short, str(place), "go")
    sent = site.send("charge", order, str(place), "never")
    begun(place, order)
    begun(place, short)
    first.process.send_signal(signal.SIGQUIT)
    eventually(lambda: "Soft Shutdown" in first.output)
    place.open("go")
    ended(first)
    assert result(ends) == 1
    assert site.lease(short) is None
    runs_again(site, sent, order)


def test_a_child_that_is_recycled_leaves_nothing_behind(site, place, order):
    worker(site, worker_max_tasks_per_child=1)
    batch = [order, *(next(orders) for _ in range(2))]
    sent = [site.send("charge", each, str(place)) for each in batch]
    assert [result(each) for each in sent] == [1, 1, 1]
    assert [site.lease(each) for each in batch] == [None, None, None]
    assert len({begun(place, each) for each in batch}) == 3


@pytest.mark.django_db
def test_g4_a_whole_workers_death_is_proven_by_a_command_and_by_the_next_delivery(
    site, place, order
):
    other = next(orders)
    first = worker(site, 2)
    site.send("idles", other, str(place), "never")
    sent = site.send("charge", order, str(place), "never")
    begun(place, order)
    begun(place, other)
    first.kill()
    for each in (order, other):
        eventually(lambda each=each: site.lease(each).holder_state == "dead")
    with override_settings(DLOCKS={"default": alias(site.redis)}):
        call_command("clear_stale_locks", "--name", f"order:{other}", "--using", "default")
    assert site.lease(other) is None
    site.redeliver()
    worker(site, 2)
    assert result(sent) == 2
    assert site.effects(order) == 1
    assert proven_by_others(site) == 1
    place.wait(f"ended-{other}")
