"""Unusual endings, follow-ups and replacements on real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.exceptions import TimeLimitExceeded

from django_dlock import AttemptsExhausted, clock
from django_dlock.lease import LeaseRequest
from testproject.servers import RedisServer
from tests.support.proxy import Proxy
from tests.support.workers import PATIENCE, Place, Site, eventually, result

FOLLOWER = 1_000_000


@pytest.fixture(scope="module")
def writing(redis: RedisServer) -> Iterator[Proxy]:
    """Between the broker and the messages that the workers publish."""
    with Proxy("127.0.0.1", redis.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A file in this place tells the next run to die before it publishes."""
    return Place(tmp_path_factory.mktemp("dying"))


@pytest.fixture(scope="module")
def site(
    redis: RedisServer, writing: Proxy, dying: Place, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A prefork worker with one child, and one of threads."""
    settings = {"CELERY_BROKER_WRITE_URL": writing.url}
    directory = tmp_path_factory.mktemp("endings")
    with Site(redis, directory, tasks="tests.support.tasks_endings", settings=settings) as site:
        site.env["DLOCK_DIES_AT"] = str(dying)
        site.worker("prefork", 1)
        site.worker("threads", 2)
        yield site


@pytest.fixture
def death(dying: Place) -> Iterator[Place]:
    """The next run that publishes dies before it does."""
    dying.open("die")
    yield dying
    for name in ("die", "died"):
        (dying.path / name).unlink(missing_ok=True)


def pending(site: Site) -> int:
    return int(
        site.query("SELECT count(*) FROM django_dlock_followup WHERE published_at IS NULL")[0][0]
    )


def told(place: Place, order: int, count: int = 1) -> list[str]:
    return place.wait(f"told-{order}", count)


def test_follow_ups_run_after_the_commit(site, place, order):
    assert result(site.send("sends", order, str(place), queue="prefork")) == "run 1"
    told(place, order)
    eventually(lambda: site.effects(order + FOLLOWER) == 1)
    eventually(lambda: pending(site) == 0)


def test_g13_a_child_killed_between_commit_and_publishing_loses_no_follow_up(
    site, place, order, death
):
    sent = site.send("sends", order, str(place), queue="prefork")
    death.wait("died")
    assert result(sent) == "run 1"
    told(place, order)
    eventually(lambda: site.effects(order + FOLLOWER) == 1)
    eventually(lambda: pending(site) == 0)
    assert (site.effects(order), len(place.lines(f"began-{order}"))) == (1, 1)


def test_g13_follow_ups_wait_for_an_unreachable_broker(site, place, order, writing):
    writing.refuse()
    try:
        sent = site.send("sends", order, str(place), queue="prefork")
        place.wait(f"ended-{order}")
        eventually(lambda: pending(site) == 2)
        # The message returns to the broker, because it cannot be requeued either.
        eventually(lambda: any("could not be requeued" in w.output for w in site.workers))
        assert place.lines(f"told-{order}") == []
    finally:
        writing.accept()
    assert result(sent) == "run 1"
    told(place, order)
    eventually(lambda: site.effects(order + FOLLOWER) == 1)
    eventually(lambda: pending(site) == 0)
    assert (site.effects(order), len(place.lines(f"began-{order}"))) == (1, 1)


def test_g13_follow_ups_survive_a_death_and_an_unreachable_broker(
    site, place, order, death, writing
):
    sent = site.send("sends", order, str(place), queue="prefork")
    death.wait("died")
    writing.refuse()
    writing.accept()
    assert result(sent) == "run 1"
    eventually(lambda: site.effects(order + FOLLOWER) == 1)
    assert len(set(told(place, order))) == 1


@pytest.mark.parametrize("queue", ["prefork", "threads"])
def test_g12_a_task_that_replaces_itself_runs_each_step_once(site, place, order, queue):
    sent = site.send("steps", order, str(place), queue=queue)
    assert result(sent) == "done in step 2"
    assert site.effects(order) == 3
    # The original message is delivered again.
    again = site.send("steps", order, str(place), task_id=sent.id, queue=queue)
    assert result(site.send("steps", order, str(place), queue=queue)) == "done in step 2"
    assert again.get() == "done in step 2"
    assert (site.effects(order), place.lines(f"step-{order}")) == (3, ["0", "1", "2"])


def test_g13_a_task_whose_child_was_killed_before_it_sent_its_replacement_continues(
    site, place, order, death
):
    sent = site.send("steps", order, str(place), queue="prefork")
    death.wait("died")
    assert result(sent) == "done in step 2"
    assert (site.effects(order), place.lines(f"step-{order}")) == (3, ["0", "1", "2"])


def test_g13_a_body_that_is_cancelled_is_run_again_by_the_same_child(site, place, order):
    sent = site.send("cancelled", order, str(place), 2, queue="prefork")
    assert result(sent) == 3
    assert site.effects(order) == 1
    pids = {line.split()[1] for line in place.lines(f"began-{order}")}
    assert len(pids) == 1


def test_a_body_that_is_always_cancelled_fails_after_max_attempts(site, place, order):
    sent = site.send("cancelled", order, str(place), 99, queue="prefork")
    with pytest.raises(AttemptsExhausted, match="CancelledError"):
        result(sent)
    assert len(place.lines(f"began-{order}")) == 4
    assert (site.effects(order), site.record(order)[0]) == (0, "failed")


def test_a_time_limit_in_a_pool_of_threads_fails_a_task_once(site, place, order):
    # Longer than a body takes to begin.
    sent = site.send("overruns", order, str(place), queue="threads", time_limit=2.5)
    with pytest.raises(TimeLimitExceeded):
        result(sent)
    assert len(place.lines(f"began-{order}")) == 1
    assert (site.effects(order), site.record(order)[0]) == (0, "failed")
    assert site.lease(order) is None


@pytest.mark.parametrize("task", ["loses", "loses_recorded"])
def test_a_task_that_always_loses_its_lock_fails_after_max_attempts(site, place, order, task):
    sent = site.send(task, order, str(place), queue="prefork")
    with pytest.raises(AttemptsExhausted):
        result(sent)
    assert len(place.lines(f"began-{order}")) == 3


def test_g12_a_redelivery_during_another_run_keeps_its_result(site, place, order):
    sent = site.send("impatient", order, str(place), queue="prefork")
    assert result(sent) == 1
    request = LeaseRequest(f"order:{order}", "a stranger", 60)
    site.locks.acquire(request, deadline=clock.now() + PATIENCE)
    again = f"impatient[{sent.id}] succeeded"
    site.send("impatient", order, str(place), task_id=sent.id, queue="prefork")
    eventually(lambda: sum(worker.output.count(again) for worker in site.workers) == 2)
    assert (site.app.AsyncResult(sent.id).state, site.effects(order)) == ("SUCCESS", 1)
