"""What lists of the ZooKeeper backend cost, and what they show of other processes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

from django_dlock import clock
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.zookeeper import ZooKeeperBackend, listing
from django_dlock.backends.zookeeper.listing import UNDER_WAY
from django_dlock.backends.zookeeper.nodes import path_of
from django_dlock.backends.zookeeper.session import Session
from django_dlock.lease import Contention, Lease, LeaseRequest
from tests.support.zookeeper import ZooKeeperServer

SESSION = 60.0
GET = KazooClient.get_async


@pytest.fixture
def prefix() -> str:
    return f"test-{secrets.token_hex(4)}"


def made(server: ZooKeeperServer, prefix: str) -> ZooKeeperBackend:
    options = AliasOptions(
        "zookeeper",
        "",
        location=server.location,
        ttl=SESSION,
        command_timeout=5.0,
        key_prefix=prefix,
    )
    return ZooKeeperBackend(options)


@pytest.fixture
def backend(zookeeper_server: ZooKeeperServer, prefix: str) -> Iterator[ZooKeeperBackend]:
    backend = made(zookeeper_server, prefix)
    yield backend
    backend.deregister("", deadline=backend.call_deadline())


@pytest.fixture
def other(zookeeper_server: ZooKeeperServer, prefix: str) -> Iterator[ZooKeeperBackend]:
    """As in another process: it has a session of its own."""
    backend = made(zookeeper_server, prefix)
    yield backend
    backend.deregister("", deadline=backend.call_deadline())


def ask(backend: ZooKeeperBackend, name: str, **kwargs: Any) -> Lease | Contention:
    request = LeaseRequest(name=name, owner=secrets.token_hex(16), **{"ttl": 20.0, **kwargs})
    return backend.acquire(request, deadline=backend.call_deadline())


class Requests:
    """Counts the requests for nodes, and those of them that are not answered yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way = self.most = self.made = self.nodes = 0
        answer = Session.answer
        for name in ("get_async", "get_children_async"):
            monkeypatch.setattr(KazooClient, name, self._counted(getattr(KazooClient, name)))

        def answered(session: Session, request: Any, deadline: float) -> Any:
            try:
                return answer(session, request, deadline)
            finally:
                self.under_way = max(0, self.under_way - 1)

        monkeypatch.setattr(Session, "answer", answered)

    def _counted(self, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.made += 1
            self.nodes += method is GET
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return method(*args, **kwargs)

        return counted


def test_a_list_has_a_bounded_number_of_requests_under_way(
    backend: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(UNDER_WAY + 20):
        assert isinstance(ask(backend, f"order:{number}"), Lease)
    requests = Requests(monkeypatch)
    assert len(backend.list()) == UNDER_WAY + 20
    # Directories and nodes are asked for side by side.
    assert requests.most <= 2 * UNDER_WAY
    assert requests.made > UNDER_WAY + 20
    requests.made = 0
    assert backend.count() == UNDER_WAY + 20
    # The root and its directories, but no node.
    assert requests.made <= 1 + 256


def test_a_list_that_is_read_again_and_again_asks_for_what_is_new(
    backend: ZooKeeperBackend, other: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = ask(other, "a", ttl=30.0)
    assert isinstance(lease, Lease)
    waits = LeaseRequest(name="a", owner=secrets.token_hex(16), ttl=30.0, waits=True)
    other.acquire(waits, deadline=other.call_deadline())
    reading, now, later = Requests(monkeypatch), clock.now, 0.0
    monkeypatch.setattr(clock, "now", lambda: now() + later)

    def asked(passed: float) -> int:
        nonlocal later
        later += passed
        reading.nodes = 0
        assert [(info.owner, info.waiting) for info in backend.list()] == [(holder, waiting)]
        return reading.nodes

    holder, waiting = lease.owner, 1
    assert asked(0) == 2
    # A node that has just become the first one may still be written.
    assert asked(9) == 2
    assert asked(2) == 2
    # Now only the waiter is read.
    assert asked(1) == 1
    other.release("a", lease.owner, min_hold=0, deadline=other.call_deadline())
    assert isinstance(other.acquire(waits, deadline=other.call_deadline()), Lease)
    holder, waiting = waits.owner, 0
    assert asked(0) == 1
    assert asked(11) == 1
    assert asked(0) == 0
    monkeypatch.setattr(listing, "READ_AGAIN", 1.0)
    assert asked(2) == 1


def test_a_lease_of_another_process_says_what_is_not_known(
    backend: ZooKeeperBackend, other: ZooKeeperBackend
) -> None:
    assert isinstance(ask(backend, "a"), Lease)
    (own,), (seen,) = backend.list(), other.list()
    assert (own.unknown, seen.unknown) == (("renewals",), ("renewals", "ttl"))
    assert own.ttl is not None
    assert own.ttl <= 20
    # If its process dies, its node stays as long as its session.
    assert seen.ttl == SESSION
    assert (seen.age, seen.holder_state) == (pytest.approx(own.age, abs=5), "alive")
    assert seen.renewed_ago is None


def test_the_locks_of_a_session_that_has_ended_are_not_listed(
    backend: ZooKeeperBackend, other: ZooKeeperBackend
) -> None:
    assert isinstance(ask(other, "a"), Lease)
    assert isinstance(ask(backend, "b"), Lease)
    assert [info.name for info in backend.list()] == ["a", "b"]
    other.deregister("", deadline=other.call_deadline())
    assert [info.name for info in backend.list()] == ["b"]


def test_a_waiter_that_is_granted_wakes_nobody_who_waits_behind_it(
    backend: ZooKeeperBackend, other: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = ask(backend, "a")
    assert isinstance(lease, Lease)
    second, third = (
        LeaseRequest(name="a", owner=secrets.token_hex(16), ttl=20.0, waits=True) for _ in range(2)
    )
    backend.acquire(second, deadline=backend.call_deadline())
    met = other.acquire(third, deadline=other.call_deadline())
    assert isinstance(met, Contention)
    backend.release("a", lease.owner, min_hold=0, deadline=backend.call_deadline())
    woken: list[bool] = []

    def interrupted() -> bool:
        # Asked when nothing has woken it for a while. By then, the second one has the lock.
        if not woken:
            granted = backend.acquire(second, deadline=backend.call_deadline())
            assert isinstance(granted, Lease)
        woken.append(False)
        return len(woken) == 3

    other.wait(third, met, until=other.call_deadline(), interrupted=interrupted)
    assert len(woken) == 3


@pytest.mark.parametrize(
    ("data", "marks"),
    [
        (b"", ("node",)),
        (b"no json", ("node",)),
        (b'{"name": "other"}', ("process", "ttl", "metadata")),
    ],
)
def test_a_node_of_another_program_hides_no_lock(
    backend: ZooKeeperBackend,
    zookeeper_server: ZooKeeperServer,
    prefix: str,
    data: bytes,
    marks: tuple[str, ...],
) -> None:
    assert isinstance(ask(backend, "a"), Lease)
    path = path_of(f"/{prefix}", "odd", "someone")
    client = KazooClient(hosts=zookeeper_server.location)
    client.start()
    try:
        client.create(path, data, makepath=True)
        sound, odd = sorted(backend.list(), key=lambda info: info.owner == "someone")
        assert (sound.name, sound.damaged) == ("a", ())
        assert odd.damaged == marks
        # Its name cannot be known.
        assert odd.name in path
        client.delete(path)
    finally:
        client.stop()
        client.close()
