"""The etcd backend on three members, of which one fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock import BackendUnavailable, Lock, clock
from django_dlock.backends.etcd import EtcdBackend
from testproject.servers import ServerNotFound
from tests.conftest import missing
from tests.support.etcd import EtcdServer, cluster
from tests.support.proxy import Proxy

from .test_etcd_faults import (
    Waiting,
    configured_alias,
    eventually,
    locked,
    renewals_of,
    request,
)

# A member that is paused or gone takes half of a call's time.
OPTIONS = {"command_timeout": 1.5, "outage_patience": 20.0}


@pytest.fixture
def members() -> Iterator[list[EtcdServer]]:
    try:
        with cluster() as members:
            yield members
    except (ServerNotFound, RuntimeError) as error:
        missing(str(error))


@pytest.fixture
def backend(members: list[EtcdServer]) -> Iterator[EtcdBackend]:
    """The default alias; the leader is the first in its list."""
    ordered = sorted(members, key=lambda member: not member.leads)
    urls = [member.url for member in ordered]
    yield from configured_alias(urls, TTL=5.0, OPTIONS=OPTIONS)


def leader(members: list[EtcdServer]) -> EtcdServer:
    (found,) = [member for member in members if member.leads]
    return found


def test_g1_a_held_lock_survives_the_death_of_the_leader(
    backend: EtcdBackend, members: list[EtcdServer]
) -> None:
    # Until the others have elected another leader, nothing is renewed.
    with Lock("name", ttl=7.0) as lock:
        waiting = Waiting.until_watching()
        leader(members).kill()
        renewals = renewals_of(backend)
        eventually(lambda: renewals_of(backend) > renewals)
        lock.check()
        assert not waiting.acquired.is_set()
        first = lock.token or 0
    assert waiting.end()
    with Lock("name") as lock:
        assert (lock.token or 0) > first > 0


def test_g1_a_leader_that_was_paused_ends_no_lease_that_was_renewed_meanwhile(
    backend: EtcdBackend, members: list[EtcdServer]
) -> None:
    # leader grants ──► paused ──► another leads, the lease is renewed ──► the first wakes up and
    # revokes what it takes for expired
    with Lock("name", ttl=8.0) as lock:
        granted_at = clock.now()
        paused = leader(members)
        others = [member for member in members if member is not paused]
        paused.pause()
        # Not during the election, which would take the rest of a call's time: before the lease ends
        # there is time for two or three calls.
        eventually(lambda: any(member.leads for member in others))
        renewed(lock)
        eventually(lambda: clock.now() > granted_at + 9.0)
        lock.check()
        paused.resume()
        renewals = renewals_of(backend)
        eventually(lambda: renewals_of(backend) > renewals + 1)
        lock.check()


def renewed(lock: Lock) -> None:
    """Renew by hand until it is confirmed; the first call loses time on the paused member."""
    while True:
        try:
            lock.renew()
        except BackendUnavailable:  # noqa: PERF203 - two or three calls
            lock.check()
        else:
            return


def test_g10_a_minority_grants_nothing_and_its_holders_are_told(
    backend: EtcdBackend, members: list[EtcdServer]
) -> None:
    lock = Lock("name")
    assert lock.acquire()
    for member in members[1:]:
        member.kill()
    began = clock.now()
    with pytest.raises(BackendUnavailable):
        backend.acquire(request("other"), deadline=backend.call_deadline())
    # A busy machine may add some seconds.
    assert clock.now() - began < OPTIONS["command_timeout"] + 3.0
    eventually(lambda: lock.lost)
    assert lock.lost_reason == "unreachable"


def test_a_member_that_does_not_answer_is_left_out(members: list[EtcdServer]) -> None:
    with Proxy("127.0.0.1", members[0].port, speaks="etcd") as silent:
        silent.black_hole()
        urls = [f"http://127.0.0.1:{silent.port}", members[1].url]
        for backend in configured_alias(urls, TTL=30.0, OPTIONS={"command_timeout": 10.0}):
            with Lock("name"):
                assert locked(backend)
            # Only the first call has lost time.
            for _ in range(5):
                with Lock("name"):
                    pass
            assert silent.connections == 1
