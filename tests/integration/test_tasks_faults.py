"""Tasks on real workers whose locks, broker or database fail."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from celery import chain, chord, group

from django_dlock import clock
from django_dlock.lease import Lease, LeaseRequest
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support import postgres
from tests.support.workers import PATIENCE, Site, eventually, result

pytestmark = pytest.mark.extended


def started() -> Iterator[RedisServer]:
    try:
        with RedisServer() as server:
            yield server
    except ServerNotFound as error:
        missing(str(error))


broker = pytest.fixture(scope="module", name="broker")(started)
locks = pytest.fixture(scope="module", name="locks")(started)


@pytest.fixture(scope="module")
def site(
    broker: RedisServer, locks: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Workers with a separate Redis for their locks."""
    with Site(broker, tmp_path_factory.mktemp("faults"), locks=locks.url) as site:
        site.worker("prefork")
        site.worker("threads")
        yield site


def hold(site: Site, order: int) -> None:
    """Hold an order's lock from outside."""
    request = LeaseRequest(f"order:{order}", f"holder of {order}", 60)
    assert isinstance(site.locks.acquire(request, deadline=clock.now() + PATIENCE), Lease)


def let_go(site: Site, order: int) -> None:
    deadline = clock.now() + PATIENCE
    site.locks.release(f"order:{order}", f"holder of {order}", min_hold=0, deadline=deadline)


def requeues(site: Site) -> int:
    """How often workers have requeued a message so far."""
    return sum(worker.output.count("is requeued") for worker in site.workers)


def test_a_body_without_a_record_is_stopped_when_it_loses_its_lock(site, place, order):
    sent = site.send("locked", order, str(place), "never")
    place.wait(f"began-{order}")
    site.break_lock(order)
    assert result(sent) == 2
    assert len(place.lines(f"ended-{order}")) == 1


def test_g12_a_redis_that_loses_its_data_during_a_run_doubles_nothing(site, place, locks, order):
    sent = [site.send("charge", order, str(place), "never") for _ in range(2)]
    place.wait(f"began-{order}")
    locks.restart()
    assert [result(each) for each in sent] == [2, 2]
    assert len(place.lines(f"ended-{order}")) == site.effects(order) == 1


@pytest.mark.parametrize("task", ["locked_once", "charge_once"])
def test_g13_a_lease_lost_in_an_outage_does_not_count_as_an_attempt(
    site, place, locks, order, task
):
    sent = site.send(task, order, str(place), "never")
    place.wait(f"began-{order}")
    before = requeues(site)
    locks.pause()
    try:
        eventually(lambda: requeues(site) > before)
    finally:
        locks.resume()
    assert result(sent) == 2


def test_g13_tasks_are_requeued_while_the_lock_backend_is_unreachable(site, place, locks, order):
    before = requeues(site)
    locks.kill()
    try:
        sent = site.send("charge", order, str(place))
        eventually(lambda: requeues(site) > before)
        assert sent.state == "RETRY"
    finally:
        locks.restart()
    assert result(sent) == 1
    assert site.effects(order) == 1


def test_a_requeued_task_keeps_its_chain_link_and_chord(site, place, order):
    hold(site, order)
    before = requeues(site)
    task = "tests.support.tasks_app.locked"
    collect = site.app.signature("tests.support.tasks_app.collect", (str(place), order))
    chained = chain(
        site.app.signature(task, (order, str(place))).set(link=collect), collect
    ).apply_async()
    chorded = chord(
        group(site.app.signature(task, (order, str(place))) for _ in range(2)), collect
    )()
    eventually(lambda: requeues(site) - before >= 3)
    assert place.lines(f"began-{order}") == []
    let_go(site, order)
    assert isinstance(result(chained), int)
    assert sorted(result(chorded)) == [1, 1] or len(result(chorded)) == 2
    # The link, the end of the chain, and the body of the chord.
    assert len(place.wait(f"collected-{order}", 3)) == 3
    assert len(place.lines(f"began-{order}")) == 3


def test_requeuing_a_task_is_logged_and_counts_as_no_retry(site, place, order):
    hold(site, order)
    sent = site.send("retries", order, str(place), retries=1)
    eventually(lambda: sent.state == "RETRY")
    assert type(sent.result).__name__ == "LockNotAcquired"
    let_go(site, order)
    assert result(sent) == 2
    assert place.lines(f"tried-{order}") == ["1", "2"]


def test_g12_g13_a_worker_killed_with_all_its_children_loses_and_doubles_nothing(
    broker, locks, tmp_path, order
):
    """No process is left to requeue the message: the broker redelivers it after a timeout."""
    with Site(broker, tmp_path, locks=locks.url) as site:
        place = site.place()
        first = site.worker("solo", 1)
        sent = site.send("charge", order, str(place), "never", queue="solo")
        place.wait(f"began-{order}")
        first.kill()
        site.redeliver()
        site.worker("solo", 1)
        assert result(sent) == 2
        assert site.effects(order) == 1
        assert site.record(order) == ("succeeded", 2, 0)


def test_g12_a_body_longer_than_the_visibility_timeout_does_not_run_twice_at_once(
    broker, locks, tmp_path, order
):
    with Site(broker, tmp_path, locks=locks.url) as site:
        place = site.place()
        site.worker("solo", 1)
        sent = site.send("charge", order, str(place), "go", queue="solo")
        place.wait(f"began-{order}")
        site.redeliver()
        site.worker("solo", 1)
        eventually(lambda: requeues(site) >= 1, why="the copy met the original")
        place.open("go")
        assert result(sent) == 1
        eventually(lambda: broker_is_idle(site), why="the copies have ended")
        assert len(place.lines(f"began-{order}")) == site.effects(order) == 1


def broker_is_idle(site: Site) -> bool:
    """No message waits, and none is unacknowledged."""
    with site.app.connection_for_read() as connection:
        client = connection.default_channel.client
        return client.llen("solo") == client.hlen("unacked") == 0


def test_g12_a_run_that_was_overtaken_rolls_back_and_returns_the_recorded_result(
    own_redis, tmp_path
):
    """With ``if_lost="finish"`` only the attempt number prevents the late run from counting."""
    try:
        with postgres.database() as url, Site(own_redis, tmp_path, postgres=url) as site:
            overtake(site)
    except postgres.PostgresNotFound as error:
        missing(str(error))


def overtake(site: Site) -> None:
    place = site.place()
    site.worker("prefork")
    slow = site.send("stubborn", 9, str(place), "go", task_id=str(uuid.uuid4()))
    place.wait("began-9")
    site.break_lock(9)
    fast = site.send("stubborn", 9, str(place), "go")
    assert result(fast) == 2
    place.open("go")
    assert result(slow) == 2
    assert len(place.lines("ended-9")) == 2
    assert site.effects(9) == 1
    assert site.record(9) == ("succeeded", 2, 0)


def test_a_pool_child_that_ends_normally_releases_its_locks(own_redis, tmp_path):
    with Site(own_redis, tmp_path) as site:
        worker = site.worker("prefork", 1)
        site.send("leaves", "left").get(timeout=PATIENCE)
        assert site.locks.get("left") is not None
        worker.stop(PATIENCE)
        # Its TTL is a minute.
        assert site.locks.get("left") is None
