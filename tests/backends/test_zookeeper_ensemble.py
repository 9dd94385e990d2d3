"""What holds while the servers of a ZooKeeper ensemble fail one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_dlock import BackendUnavailable, Lock, locks
from django_dlock.lease import LeaseRequest
from tests.support.aliases import configured
from tests.support.zookeeper import ServerNotFound, ZooKeeperServer, ensemble

TIMEOUT = 2.0
SESSION = 40.0


def eventually(condition: Callable[[], Any], patience: float = 40.0) -> None:
    give_up_at = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@pytest.fixture(scope="module")
def running() -> Iterator[list[ZooKeeperServer]]:
    try:
        with ensemble() as servers:
            yield servers
    except (ServerNotFound, RuntimeError) as error:
        from tests.conftest import missing

        missing(str(error))


@pytest.fixture
def servers(running: list[ZooKeeperServer]) -> Iterator[list[ZooKeeperServer]]:
    """Three servers that have found a leader; all of them run again after each test."""
    eventually(lambda: sorted(server.mode for server in running) == MODES)
    yield running
    for server in running:
        server.resume()


MODES = ["follower", "follower", "leader"]


def alias(*servers: ZooKeeperServer) -> dict[str, Any]:
    return {
        "BACKEND": "django_dlock.backends.zookeeper.ZooKeeperBackend",
        "LOCATION": [server.location for server in servers],
        "TTL": SESSION,
        "WAIT": 60.0,
        "OPTIONS": {
            "command_timeout": TIMEOUT,
            "session_timeout": SESSION,
            "outage_patience": 30.0,
        },
    }


def leader_of(servers: list[ZooKeeperServer]) -> ZooKeeperServer:
    return next(server for server in servers if server.mode == "leader")


def renewed(lock: Lock) -> bool:
    try:
        lock.renew()
    except BackendUnavailable:
        return False
    return True


def test_g1_leases_are_kept_and_waiters_served_when_the_leader_is_killed(
    servers: list[ZooKeeperServer],
) -> None:
    tokens: list[int | None] = []
    losses: list[str] = []

    def wait() -> None:
        with Lock("it") as lock:
            tokens.append(lock.token)

    with configured({"default": alias(*servers)}):
        lock = Lock("it", on_lost=lambda lock, reason: losses.append(reason))
        assert lock.acquire()
        tokens.append(lock.token)
        waiter = threading.Thread(target=wait)
        waiter.start()
        eventually(lambda: (info := locks["default"].get("it")) is not None and info.waiting)
        leader = leader_of(servers)
        leader.kill()

        eventually(lambda: renewed(lock))
        # While the ensemble settles, its connection may be cut once more.
        eventually(lambda: lock.state == "held")
        assert losses == []
        assert tokens == [lock.token]
        lock.release()
        waiter.join(60)
        # The new leader counts from a new epoch.
        assert len(tokens) == 2
        assert tokens == sorted(set(tokens))
        leader.restart()


def test_g1_a_holder_leaves_a_server_that_does_not_answer(servers: list[ZooKeeperServer]) -> None:
    losses: list[str] = []
    # Without its leader, the ensemble would have to elect another one first.
    followers = [server for server in servers if server.mode == "follower"]
    with (
        configured({"default": alias(*followers)}),
        Lock("it", on_lost=lambda lock, reason: losses.append(reason)) as lock,
    ):
        session = locks["default"]._sessions.session  # type: ignore[attr-defined]
        port = session.client._connection._socket.getpeername()[1]
        silent = next(server for server in followers if server.port == port)
        silent.pause()
        # By itself the client would stay there for two thirds of the session.
        eventually(lambda: renewed(lock), SESSION / 2)
        eventually(lambda: lock.state == "held")
        assert losses == []
        silent.resume()


# One question each time: a call without an answer leaves its connection, on which alone the server
# would still answer a read.
@pytest.mark.parametrize("asks", ["holder", "waiter"])
def test_g1_a_server_that_has_lost_the_others_confirms_nothing(
    servers: list[ZooKeeperServer], asks: str
) -> None:
    follower = next(server for server in servers if server.mode == "follower")
    with configured({"default": alias(follower)}):
        lock, backend = Lock("it"), locks["default"]
        assert lock.acquire()
        waits = LeaseRequest(name="it", owner="waiter", ttl=SESSION / 4, waits=True)
        backend.acquire(waits, deadline=backend.call_deadline())
        others = [server for server in servers if server is not follower]
        try:
            for server in others:
                server.pause()
            # It would still answer a read, although a busy machine may answer it late.
            eventually(lambda: follower.mode == "follower")
            with pytest.raises(BackendUnavailable):
                if asks == "holder":
                    lock.renew()
                else:
                    backend.acquire(waits, deadline=backend.call_deadline())
        finally:
            for server in others:
                server.resume()
        eventually(lambda: sorted(server.mode for server in servers) == MODES)
        # Its client may first have to connect again.
        eventually(lambda: renewed(lock))
        backend.cancel_acquire(waits, deadline=backend.call_deadline())
        lock.release()
