"""A replica takes over while locks are held, renewed and waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import redis

from django_dlock import Lock, clock
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.support.aliases import alias, configured
from tests.support.databases import until
from tests.support.redis_calls import client
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_sentinel import RedisSentinel

TTL = 20.0


class Failing(NamedTuple):
    """Where the locks are, and what makes their server fail.

    Attributes:
        entry: In ``DLOCKS``.
        server: The one that has the locks.
        heir: Its replica.
    """

    entry: dict[str, Any]
    server: RedisServer
    heir: RedisServer


@contextlib.contextmanager
def with_sentinel() -> Iterator[Failing]:
    with RedisSentinel(patience=3) as watched:
        entry = {"location": watched.LOCATION, "OPTIONS": watched.options}
        yield Failing(entry, watched.primary, watched.replica)


@contextlib.contextmanager
def with_cluster() -> Iterator[Failing]:
    with RedisCluster() as cluster:
        options = {"cluster_nodes": cluster.addresses}
        entry = {"location": cluster.stranger.url, "OPTIONS": options}
        yield Failing(entry, cluster.owner, cluster.heir)


@pytest.fixture(params=[with_sentinel, with_cluster], ids=["sentinel", "cluster"])
def failing(request: pytest.FixtureRequest) -> Iterator[Failing]:
    beds: Callable[[], Any] = request.param
    with contextlib.ExitStack() as stack:
        try:
            failing = stack.enter_context(beds())
        except ServerNotFound as error:
            missing(str(error))
        options = {**failing.entry["OPTIONS"], "command_timeout": 2.0, "outage_patience": 60.0}
        entry = alias(failing.entry["location"], TTL=TTL, WAIT=90.0, OPTIONS=options)
        stack.enter_context(configured({"default": entry}))
        yield failing


def is_primary(server: RedisServer) -> bool:
    # A server that Sentinel promotes closes the connections of its clients.
    with client(server) as asking, contextlib.suppress(redis.ConnectionError):
        return bool(asking.info("replication")["role"] == "master")
    return False


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_g1_a_lock_is_kept_renewed_and_waited_for_through_a_fail_over(failing, how):
    order: list[object] = []
    holder = Lock("name")
    assert holder.acquire()
    token = holder.token
    waiting = threading.Event()

    def wait_for_it() -> None:
        waiting.set()
        with Lock("name") as lock:
            order.append(lock.token)

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    assert waiting.wait(20)
    with client(failing.server) as asking:
        # So that the fail-over loses nothing.
        asking.set("{dlock:0}:written", 1)
        assert asking.wait(1, 20_000) == 1
    getattr(failing.server, how)()
    ends = clock.now() + holder.remaining
    try:
        until(lambda: is_primary(failing.heir), 60)
        # Held again, because the new primary has answered a renewal.
        until(lambda: holder.state == "held" and clock.now() + holder.remaining > ends + 0.5, 60)
        order.append("released")
        holder.release()
        thread.join(90)
        assert order[0] == "released"
        assert order[1] > token
    finally:
        if how == "pause":
            failing.server.resume()
