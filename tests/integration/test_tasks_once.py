"""The promises for tasks on real workers: once per key, never lost, released after the commit."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from django_dlock import AttemptsExhausted
from django_dlock.lease import Lease, LeaseRequest
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support import postgres
from tests.support.workers import Site, eventually, result


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Two workers with the same broker and database: a prefork one and a solo one."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    try:
        with RedisServer() as redis:
            if request.param == "sqlite":
                with Site(redis, directory) as made:
                    yield _staffed(made)
            else:
                with postgres.database() as url, Site(redis, directory, postgres=url) as made:
                    yield _staffed(made)
    except (ServerNotFound, postgres.PostgresNotFound) as error:
        missing(str(error))


def _staffed(site: Site) -> Site:
    site.worker("prefork")
    site.worker("solo", 1)
    return site


def test_g12_simultaneous_duplicates_have_one_effect_and_one_result(site, place, order):
    sent = [site.send("charge", order, str(place)) for _ in range(4)]
    assert [result(each) for each in sent] == [1, 1, 1, 1]
    assert site.effects(order) == 1


def test_g12_one_message_published_twice_has_one_effect(site, place, order):
    task_id = str(uuid.uuid4())
    for _ in range(2):
        found = site.send("charge", order, str(place), task_id=task_id)
    assert result(found) == 1
    late = site.send("charge", order, str(place))
    assert result(late) == 1
    assert site.effects(order) == 1


def test_g12_a_late_duplicate_gets_the_recorded_result(site, place, order):
    assert result(site.send("charge", order, str(place))) == 1
    assert result(site.send("charge", order, str(place))) == 1
    assert len(place.lines(f"began-{order}")) == site.effects(order) == 1


def test_a_body_longer_than_its_ttl_keeps_others_out(site, place, order):
    first = site.send("charge", order, str(place), "go")
    place.wait(f"began-{order}")
    second = site.send("charge", order, str(place), "go")
    token = site.lease(order).token
    # There are three renewals per TTL.
    eventually(lambda: site.lease(order).renewals > 4, why="renewed for longer than the TTL")
    assert site.lease(order).token == token
    assert len(place.lines(f"began-{order}")) == 1
    place.open("go")
    assert (result(first), result(second)) == (1, 1)
    assert site.effects(order) == 1


def test_g15_the_lock_is_released_only_after_the_commit(site, place, order):
    """The next holder of the lock sees what the body wrote."""
    site.send("charge", order, str(place), "go")
    place.wait(f"began-{order}")
    request = LeaseRequest(f"order:{order}", f"holder of {order}", 5)
    place.open("go")
    eventually(
        lambda: isinstance(site.locks.acquire(request, deadline=site.locks.call_deadline()), Lease)
    )
    assert site.effects(order) == 1
    site.locks.release(request.name, request.owner, min_hold=0, deadline=site.locks.call_deadline())


def test_g12_g13_a_child_killed_in_the_middle_is_run_again_and_counts_once(site, place, order):
    sent = site.send("charge", order, str(place), "never", queue="prefork")
    pid = int(place.wait(f"began-{order}")[0].split()[1])
    os.kill(pid, signal.SIGKILL)
    assert result(sent) == 2
    assert site.effects(order) == 1
    assert site.record(order) == ("succeeded", 2, 0)


def test_g13_a_task_that_always_dies_fails_after_max_attempts(site, place, order):
    sent = site.send("killed", order, str(place), queue="prefork")
    with pytest.raises(AttemptsExhausted, match="2 runs"):
        result(sent)
    assert len(place.lines(f"began-{order}")) == 2
    assert site.effects(order) == 0
    assert site.record(order) == ("failed", 3, 2)


@pytest.mark.parametrize("how", ["retry", "reject"])
def test_g12_a_retried_or_rejected_run_counts_once(site, place, order, how):
    assert result(site.send("ends", order, str(place), how)) == 2
    assert len(place.lines(f"began-{order}")) == 2
    assert site.effects(order) == 1
    assert site.record(order)[0] == "succeeded"


def test_g12_an_ignored_run_commits_and_is_recorded(site, place, order):
    site.send("ends", order, str(place), "ignore")
    eventually(lambda: site.effects(order) == 1)
    assert site.record(order)[0] == "succeeded"
    assert result(site.send("ends", order, str(place), "ignore")) is None
    assert site.effects(order) == 1


@pytest.mark.parametrize("how", ["raise", "soft limit"])
def test_g13_a_failed_run_leaves_no_effect_and_its_key_can_be_claimed_again(
    site, place, order, how
):
    failed = site.send("ends", order, str(place), how)
    with pytest.raises(Exception, match=r".*"):
        result(failed)
    assert failed.state == "FAILURE"
    assert site.effects(order) == 0
    assert site.record(order)[0] == "failed"
    assert result(site.send("ends", order, str(place), how)) == 2
    assert site.effects(order) == 1


def test_g12_a_run_whose_result_cannot_be_recorded_counts_as_done(site, place, order):
    site.send("ends", order, str(place), "unserialisable", ignore_result=True)
    place.wait(f"ended-{order}")
    eventually(lambda: site.record(order)[0] == "succeeded")
    assert site.effects(order) == 1
    assert result(site.send("ends", order, str(place), "unserialisable")) is None
    eventually(lambda: any("result is not recorded" in each.output for each in site.workers))


def test_g13_a_soft_limit_in_the_middle_rolls_back_and_fails(site, place, order):
    # Longer than a body takes to begin.
    sent = site.send("limited", order, str(place), queue="prefork", soft_time_limit=2.5)
    with pytest.raises(SoftTimeLimitExceeded):
        result(sent)
    assert site.effects(order) == 0
    assert site.record(order)[0] == "failed"
    assert site.lease(order) is None


def test_autoretry_passes_through_the_lock(site, place, order):
    assert result(site.send("retries", order, str(place))) == 1
