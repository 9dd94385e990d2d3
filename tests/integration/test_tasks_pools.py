"""A lease that is lost or kept while a body runs, on a real worker of each pool."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Iterator

import psycopg
import pytest
from celery.exceptions import TimeLimitExceeded

from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support import postgres
from tests.support.workers import PATIENCE, Place, Site, Worker, eventually, orders, result

pytestmark = pytest.mark.extended

OTHER = "other"

HAS_GEVENT = importlib.util.find_spec("gevent") is not None
no_gevent = pytest.mark.skipif(not HAS_GEVENT, reason="gevent is not installed: there is no wheel")
GEVENT = pytest.param("gevent", marks=no_gevent)
POOLS = ["prefork", "threads", "solo", GEVENT]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """On PostgreSQL: a thread that waits for SQLite's write lock would block gevent's hub."""
    directory = tmp_path_factory.mktemp("pools")
    try:
        with (
            RedisServer() as redis,
            postgres.database() as url,
            Site(redis, directory, postgres=url, tasks="tests.support.tasks_pools") as site,
        ):
            yield site
            for worker in site.workers:
                # Under gevent, Celery takes seconds to shut down.
                worker.kill()
    except (ServerNotFound, postgres.PostgresNotFound) as error:
        missing(str(error))


@pytest.fixture(scope="module")
def workers(site: Site) -> dict[str, Worker]:
    """The workers started so far, by pool."""
    return {}


@pytest.fixture
def worker(request: pytest.FixtureRequest, site: Site, workers: dict[str, Worker]) -> Worker:
    """The worker of the test's ``pool``, started once."""
    return started(request.getfixturevalue("pool"), site, workers)


def started(pool: str, site: Site, workers: dict[str, Worker]) -> Worker:
    if pool not in workers:
        workers[pool] = site.worker(pool, 1 if pool == "solo" else 10)
    return workers[pool]


@pytest.fixture
def other(site: Site, workers: dict[str, Worker]) -> str:
    """The queue of a worker other than the tested one."""
    if OTHER not in workers:
        workers[OTHER] = site.worker("threads", 2, "-Q", OTHER)
    return OTHER


def told_lost(worker: Worker, order: int) -> bool:
    return f"Lock 'order:{order}' (alias 'default') was lost" in worker.output


def open_pipe(place: Place) -> None:
    """Let a body continue that reads from the pipe."""
    os.close(os.open(place.path / "pipe", os.O_WRONLY))


def test_renewals_go_on_past_the_ttl_while_bodies_wait(site, place, workers):
    """In all pools at once."""
    at_once = {"prefork": 2, "threads": 8, "solo": 1, "gevent": 8 if HAS_GEVENT else 0}
    sent = {}
    for pool, count in at_once.items():
        if count:
            started(pool, site, workers)
        for order in itertools.islice(orders, count):
            sent[order] = site.send("charge", order, str(place), "go", queue=pool)
    for order in sent:
        place.wait(f"began-{order}")
    tokens = [site.lease(order).token for order in sent]
    # There are three renewals per TTL.
    eventually(lambda: all(site.lease(order).renewals > 4 for order in sent))
    assert [site.lease(order).token for order in sent] == tokens
    place.open("go")
    assert [result(each) for each in sent.values()] == [1] * len(sent)
    assert [site.effects(order) for order in sent] == [1] * len(sent)


@pytest.mark.parametrize("pool", POOLS)
def test_g12_a_body_that_lost_its_lease_is_stopped_and_run_again(site, place, worker, order, pool):
    sent = site.send("charge", order, str(place), "never", queue=pool)
    place.wait(f"began-{order}")
    site.break_lock(order)
    assert result(sent) == 2
    assert len(place.lines(f"ended-{order}")) == site.effects(order) == 1
    assert site.record(order) == ("succeeded", 2, 0)


@pytest.mark.parametrize("pool", POOLS)
def test_g12_a_body_that_swallows_the_interruption_is_interrupted_again(
    site, place, worker, order, pool
):
    """If it returns nevertheless, its result does not count."""
    sent = site.send("swallows", order, str(place), queue=pool)
    place.wait(f"began-{order}")
    site.break_lock(order)
    assert result(sent) == 2
    assert place.lines(f"swallowed-{order}") == ["LeaseAborted"] * 3
    assert len(place.lines(f"ended-{order}")) == 2
    assert site.effects(order) == 1
    assert site.record(order) == ("succeeded", 2, 0)


@pytest.mark.parametrize("pool", POOLS)
def test_g12_whether_a_body_that_finishes_after_a_loss_counts_depends_on_its_attempt(
    site, place, worker, other, pool
):
    order = next(orders)
    slow = site.send("stubborn", order, str(place), "go", queue=pool)
    place.wait(f"began-{order}")
    site.break_lock(order)
    fast = site.send("stubborn", order, str(place), "go", queue=other)
    assert result(fast) == 2
    eventually(lambda: told_lost(worker, order))
    assert len(place.lines(f"ended-{order}")) == 1
    place.open("go")
    assert result(slow) == 2
    assert len(place.lines(f"ended-{order}")) == 2
    assert site.effects(order) == 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_body_in_a_c_call_is_interrupted_when_the_call_returns(site, place, worker, order, pool):
    os.mkfifo(place.path / "pipe")
    sent = site.send("blocks", order, str(place), "in_c", "never", queue=pool)
    place.wait(f"began-{order}")
    site.break_lock(order)
    eventually(lambda: told_lost(worker, order))
    assert site.record(order) == ("running", 1, 0)
    open_pipe(place)
    assert result(sent) == 2
    assert len(place.lines(f"ended-{order}")) == site.effects(order) == 1
    assert site.record(order) == ("succeeded", 2, 0)


@pytest.mark.parametrize("pool", POOLS)
def test_a_body_in_a_query_is_interrupted_when_the_query_returns_or_sooner(
    site, place, worker, order, pool
):
    with psycopg.connect(site.postgres) as session:
        session.execute("SELECT pg_advisory_xact_lock(%s)", [order])
        sent = site.send("blocks", order, str(place), "in_a_query", "never", queue=pool)
        place.wait(f"began-{order}")
        site.break_lock(order)
        eventually(lambda: told_lost(worker, order))
    assert result(sent) == 2
    assert len(place.lines(f"ended-{order}")) == site.effects(order) == 1
    assert site.record(order) == ("succeeded", 2, 0)


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize(
    ("pool", "how"),
    [
        pytest.param("gevent", "in_c", marks=no_gevent),
        pytest.param("gevent", "in_a_loop", marks=no_gevent),
    ],
)
def test_g12_a_body_that_blocks_gevents_hub_prevents_renewals(site, place, worker, pool, how):
    """Its lease ends and another run takes over; the first notices the loss and does not count."""
    order = next(orders)
    os.mkfifo(place.path / "pipe")
    woken_late = worker.output.count("The watchdog woke")
    slow = site.send("blocks", order, str(place), how, queue=pool)
    place.wait(f"began-{order}")
    fast = site.send("blocks", order, str(place), how, queue=OTHER)
    assert result(fast) == 2
    assert place.lines(f"lost-{order}") == []
    if how == "in_c":
        open_pipe(place)
    else:
        place.open("loop")
    assert result(slow) == 2
    assert place.lines(f"lost-{order}") == ["True"]
    assert len(place.lines(f"ended-{order}")) == 2
    assert site.effects(order) == 1
    eventually(lambda: told_lost(worker, order))
    eventually(lambda: worker.output.count("The watchdog woke") > woken_late)


@pytest.mark.parametrize("pool", [GEVENT])
def test_g6_a_lock_ends_with_the_greenlet_that_did_not_release_it(site, worker, pool):
    site.send("forgets", "forgotten", queue=pool).get(timeout=PATIENCE)
    assert site.locks.get("forgotten") is not None
    eventually(lambda: site.locks.get("forgotten") is None)


@pytest.mark.parametrize("pool", [GEVENT])
def test_a_hard_limit_of_a_greenlet_ends_its_run_and_reports_no_dead_process(
    site, place, worker, order, pool
):
    """The process id that Celery reports is the address of the greenlet."""
    sent = site.send("charge", order, str(place), "never", queue=pool, time_limit=1)
    with pytest.raises(TimeLimitExceeded):
        result(sent)
    assert (site.lease(order), site.effects(order)) == (None, 0)
    assert result(site.send("charge", order, str(place), "never", queue=pool)) == 2
    assert site.record(order) == ("succeeded", 2, 0)
    assert "its lock could not be recovered" not in worker.output


def test_each_replacement_of_a_child_renews_and_releases(site, place):
    """One child per task: each starts without threads and ends normally."""
    options = {"full": "--max-memory-per-child=1", "done": "--max-tasks-per-child=1"}
    workers = [site.worker("prefork", 1, option, "-Q", why) for why, option in options.items()]
    pids = [result(site.send("leaves", why, queue=why)) for why in options]
    for why in options:
        # Its TTL is a minute.
        eventually(lambda why=why: site.locks.get(why) is None)
    for worker, why in zip(workers, options, strict=True):
        told = re.compile(rf"Lock '{why}' \(alias 'default'\) was lost after .*: exit")
        eventually(lambda told=told, worker=worker: told.search(worker.output))
    at_work = [next(orders) for _ in options]
    sent = [
        site.send("charge", order, str(place), "go", queue=why)
        for order, why in zip(at_work, options, strict=True)
    ]
    for order in at_work:
        pids.append(int(place.wait(f"began-{order}")[0].split()[1]))
        eventually(lambda order=order: site.lease(order).renewals > 4)
    place.open("go")
    assert [result(each) for each in sent] == [1, 1]
    assert len(set(pids)) == 4
    assert all(worker.process.poll() is None for worker in workers)
