"""A client of uvicorn that closes its socket while its view is at work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock import locks
from testproject.servers import RedisServer
from tests.support.aliases import alias, configured
from tests.support.asgi_site import AsgiSite

pytestmark = pytest.mark.extended

COUNT = "SELECT count(*) FROM shop_effect"
STATES = "SELECT state FROM django_dlock_idempotencyrecord"


@pytest.fixture
def site(own_redis: RedisServer) -> Iterator[AsgiSite]:
    with AsgiSite(own_redis.url) as site:
        yield site


def test_g12_a_client_that_closes_its_socket_and_repeats_gets_the_answer_of_one_run(
    site: AsgiSite,
) -> None:
    site.leave_in_the_middle("/once/")
    in_progress = site.ask("POST", "/once/")
    assert (in_progress.status, in_progress.getheader("Retry-After") is None) == (409, False)
    site.let_go_on()
    while (repeated := site.ask("POST", "/once/")).status == 409:
        pass
    assert (repeated.status, repeated.getheader("Idempotent-Replayed")) == (200, "true")
    assert site.query(COUNT) == [(1,)]
    assert site.query(STATES) == [("succeeded",)]
    assert site.written() == ["begin", "locked"]


def test_g1_bodies_on_threads_do_not_overlap_after_a_client_has_closed_its_socket(
    site: AsgiSite,
) -> None:
    site.leave_in_the_middle("/locked/")
    assert site.ask("POST", "/locked/").status == 409
    site.let_go_on()
    while site.ask("POST", "/locked/").status == 409:
        pass
    assert site.written() == ["begin", "locked", "begin", "locked"]


def test_a_view_that_may_be_cancelled_releases_when_its_client_closes_its_socket(
    site: AsgiSite,
) -> None:
    site.leave_in_the_middle("/cancelled/")
    while site.ask("POST", "/cancelled/").status == 409:
        pass
    assert site.written() == ["begin", "begin", "locked"]
    site.let_go_on()


def test_g12_a_server_that_shuts_down_waits_for_views_without_their_clients(
    site: AsgiSite,
) -> None:
    site.leave_in_the_middle("/once/")
    site.terminate()
    site.let_go_on()
    site.wait()
    assert site.query(STATES) == [("succeeded",)]
    assert site.written() == ["begin", "locked"]


def test_g12_a_server_that_is_out_of_patience_dies_in_the_middle_of_a_run(
    own_redis: RedisServer,
) -> None:
    with AsgiSite(own_redis.url, "--timeout-graceful-shutdown", "1") as site:
        site.leave_in_the_middle("/once/")
        site.terminate()
        site.wait()
        # Its thread has died with it. The run counts as dead, not as failed.
        assert site.written() == ["begin"]
        assert site.query(STATES) == [("running",)]
        with configured({"default": alias(own_redis.url)}):
            assert len(locks["default"].list()) == 1
