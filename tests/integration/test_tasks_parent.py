"""Children of real workers die; their parent releases their locks.

The TTL is half a minute, so a lock that is free here has been released.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from django_dlock import clock, process
from django_dlock.lease import Lease, LeaseInfo, LeaseRequest
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, Place, Site, eventually, orders, result

pytestmark = pytest.mark.extended

TTL = 30.0
LOST_WAIT = 3600.0
"""Celery's setting, which does not delay the message of a dead child where Redis is the broker:
each test that waits for such a message would fail."""
SOON = 10.0
"""Seconds; much less than any TTL and long enough for any machine."""


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    """One for messages and results, one for the locks."""
    try:
        with RedisServer() as broker, RedisServer() as locks:
            yield broker, locks
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture(scope="module")
def messages(servers: tuple[RedisServer, RedisServer]) -> Iterator[Proxy]:
    """Between the worker and its broker."""
    with Proxy("127.0.0.1", servers[0].port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def site(
    servers: tuple[RedisServer, RedisServer],
    messages: Proxy,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    broker, locks = servers
    alias = {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": locks.url,
        "TTL": TTL,
        "OPTIONS": {"command_timeout": 2.0},
    }
    with Site(
        broker,
        tmp_path_factory.mktemp("parent"),
        locks=locks.url,
        settings={
            "DLOCKS": {"default": alias},
            "CELERY_BROKER_READ_URL": messages.url,
            "CELERY_WORKER_LOST_WAIT": LOST_WAIT,
        },
        tasks="tests.support.tasks_dying",
    ) as site:
        site.worker("prefork")
        yield site


def begun(place: Place, order: int) -> int:
    """The process of a body that has begun."""
    return int(place.wait(f"began-{order}")[0].split()[1])


def held(site: Site, order: int) -> LeaseInfo:
    lease = site.lease(order)
    assert lease is not None
    return lease


def proven_by_others(site: Site) -> int:
    """How often another process, and not the parent, found a holder dead."""
    return sum(worker.output.count("its holder is dead") for worker in site.workers)


def broken_by_the_parent(site: Site, order: int) -> int:
    line = f"Lock 'order:{order}' (alias 'default') is free"
    return sum(worker.output.count(line) for worker in site.workers)


def free(site: Site, order: int) -> None:
    """Wait until nobody holds the lock; check that its holder was dead before."""
    known = held(site, order)

    def ended() -> bool:
        nonlocal known
        lease = site.lease(order)
        if lease is not None and lease.owner == known.owner:
            known = lease
            return False
        assert known.process is not None
        assert process.death_proof(known.process) is not None, "broken under a living holder"
        return lease is None

    eventually(ended, SOON)


def outsider(site: Site, order: int) -> LeaseRequest:
    """Holds an order's lock from outside."""
    request = LeaseRequest(f"order:{order}", "outsider", 60)
    assert isinstance(site.locks.acquire(request, deadline=clock.now() + PATIENCE), Lease)
    return request


@pytest.mark.parametrize("how", ["killed", "stopped and killed", "out of memory"])
def test_g4_a_dead_childs_lock_is_broken_before_its_message_comes_back(site, place, order, how):
    if how == "out of memory":
        sent = site.send("dies", order, str(place))
    else:
        sent = site.send("charge", order, str(place), "never")
        child = begun(place, order)
        if how == "stopped and killed":
            os.kill(child, signal.SIGSTOP)
        os.kill(child, signal.SIGKILL)
    assert result(sent) == 2
    assert site.effects(order) == 1
    assert site.record(order) == ("succeeded", 2, 0)
    # The second delivery found no lock, so it had no death to prove.
    assert broken_by_the_parent(site, order) == 1
    assert proven_by_others(site) == 0
    events = "SELECT event, reason FROM django_dlock_lockevent WHERE name = ?"
    eventually(
        lambda: site.query(events, f"order:{order}") == [("taken_over", "holder_dead")], SOON
    )


def test_g4_the_parent_also_breaks_a_lock_that_the_body_has_acquired_again(
    site: Site, place: Place, order: int
) -> None:
    sent = site.send("acquires_again", order, str(place), "never")
    os.kill(begun(place, order), signal.SIGKILL)
    assert result(sent) == 2
    assert broken_by_the_parent(site, order) == 1
    assert proven_by_others(site) == 0


@pytest.mark.parametrize("since", ["the start", "its broker came back"])
def test_g4_only_the_message_of_the_dead_child_waits_for_the_break(
    site, messages, place, order, since
):
    """Finding the name of the lock takes long, which must not block the worker's loop."""
    if since == "its broker came back":
        ready = "Connection to broker lost", "Connected to redis"
        lost, connected = map(site.workers[0].output.count, ready)
        messages.cut()
        eventually(lambda: site.workers[0].output.count(ready[0]) > lost)
        eventually(lambda: site.workers[0].output.count(ready[1]) > connected)
    other = next(orders)
    sent = site.send("slow_key", order, str(place), "never")
    os.kill(begun(place, order), signal.SIGKILL)
    place.wait(f"looked-for-{order}")
    assert result(site.send("idles", other, str(place))) == 1
    place.open("key")
    assert result(sent) == 2
    assert broken_by_the_parent(site, order) == 1
    assert proven_by_others(site) == 0


def test_g4_after_the_hard_limit_the_lock_is_freed_once_the_child_is_dead(site, place, order):
    # Longer than a body takes to begin.
    sent = site.send("deaf", order, str(place), "never", time_limit=2.5)
    begun(place, order)
    free(site, order)
    with pytest.raises(TimeLimitExceeded):
        result(sent)
    eventually(lambda: broken_by_the_parent(site, order) == 1, SOON)
    # Nothing was requeued. The next message with this key takes it over.
    assert site.effects(order) == 0
    assert site.record(order) == ("running", 1, 0)
    assert result(site.send("deaf", order, str(place), "never")) == 2
    assert site.effects(order) == 1


@pytest.mark.parametrize("by", ["SIGKILL", "SIGTERM"])
def test_g4_terminating_a_task_frees_its_lock(site, place, order, by):
    sent = site.send("charge", order, str(place), "never")
    begun(place, order)
    site.app.control.revoke(sent.id, terminate=True, signal=by)
    with pytest.raises(TaskRevokedError):
        result(sent)
    # SIGTERM raises in the body, and the child itself releases the lock.
    eventually(lambda: site.lease(order) is None, SOON)
    eventually(lambda: broken_by_the_parent(site, order) == (by == "SIGKILL"), SOON)
    assert result(site.send("charge", order, str(place), "never")) == 2
    assert site.effects(order) == 1


def test_g4_only_the_lease_of_the_dead_delivery_is_broken(site, place, order):
    """Not the lease of another child, and not one that the dead body acquired itself."""
    other, own = next(orders), f"own:{order}"
    site.send("idles", order, str(place), "never", own)
    site.send("idles", other, str(place), "go")
    child, lease = begun(place, order), held(site, order)
    begun(place, other)
    neighbours = held(site, other)
    os.kill(child, signal.SIGKILL)
    eventually(lambda: broken_by_the_parent(site, order) == 1, SOON)
    still = held(site, other)
    assert (still.owner, still.token) == (neighbours.owner, neighbours.token)
    left = site.locks.get(own)
    assert (left.process, left.holder_state) == (lease.process, "dead")
    place.open("go")
    eventually(lambda: place.lines(f"ended-{other}"), SOON)
    assert len(place.lines(f"began-{other}")) == 1


def test_a_child_that_dies_while_waiting_leaves_the_queue_and_its_message_comes_back(
    site, place, order
):
    request = outsider(site, order)
    sent = site.send("waits", order, str(place))
    eventually(lambda: held(site, order).waiting == 1)
    os.kill(int(place.wait(f"asked-{order}")[0]), signal.SIGKILL)
    eventually(lambda: site.workers[0].output.count(f"[{sent.id}] received") == 2, SOON)
    # A dead waiter that stayed in the queue would be counted as long as the lease can live.
    eventually(lambda: held(site, order).waiting == 1, SOON)
    site.locks.release(request.name, request.owner, min_hold=0, deadline=site.locks.call_deadline())
    assert result(sent) == 1


def test_g13_a_task_whose_child_dies_while_the_locks_are_unreachable_runs_again(
    site, servers, place, order
):
    """The message waits for the break, but not for long; the break is repeated later."""
    _, locks = servers
    sent = site.send("charge", order, str(place), "never")
    child = begun(place, order)
    locks.pause()
    try:
        os.kill(child, signal.SIGKILL)
        eventually(lambda: site.workers[0].output.count(f"[{sent.id}] received") > 1, SOON)
    finally:
        locks.resume()
    assert result(sent) == 2
    assert site.effects(order) == 1
    assert site.record(order) == ("succeeded", 2, 0)
