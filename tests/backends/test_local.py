"""The in-process backend fulfils the contract, and says what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.local import LocalBackend
from django_dlock.lease import Lease, LeaseRequest, Renewal
from django_dlock.process import current
from django_dlock.testing import BackendContract, FakeClock
from django_dlock.testing.contract_waiting import WaitingContract
from tests.support.awaited import AwaitedLocalBackend

pytestmark = pytest.mark.quick


@pytest.fixture
def backend(local_backend: LocalBackend) -> LocalBackend:
    return local_backend


class TestLocal(BackendContract):
    pass


class TestAwaitedLocal(WaitingContract):
    @pytest.fixture
    def backend(self) -> Iterator[AwaitedLocalBackend]:
        backend = AwaitedLocalBackend(AliasOptions("local", "local"))
        yield backend
        backend.close()


def test_it_declares_that_other_processes_do_not_see_its_leases(local_backend):
    assert not local_backend.is_shared


def test_it_uses_the_fake_clock(local_backend):
    with FakeClock() as time:
        deadline = time() + 1
        lease = local_backend.acquire(LeaseRequest("a", "one", 30.0), deadline=deadline)
        assert isinstance(lease, Lease)
        assert lease.deadline == time() + 29.7
        time.advance(29.9)
        assert local_backend.locked("a", deadline=deadline)
        time.advance(0.2)
        assert not local_backend.locked("a", deadline=deadline)


def test_old_names_are_discarded(local_backend):
    with FakeClock() as time:
        for number in range(3000):
            local_backend.acquire(LeaseRequest(f"n{number}", "o", 1.0), deadline=time() + 1)
            time.advance(1.0)
        assert len(local_backend._entries) + len(local_backend._ends) < 1200


def test_waiters_of_a_process_that_has_ended_are_dead(local_backend):
    deadline = local_backend.call_deadline()
    for owner in ("one", "two"):
        local_backend.acquire(LeaseRequest("a", owner, 30.0, waits=True), deadline=deadline)
    assert [it.state for it in local_backend.waiters("a")] == ["alive"]
    local_backend.deregister(current().id, deadline=deadline)
    assert [it.state for it in local_backend.waiters("a")] == ["dead"]


def test_a_renewal_that_leaves_a_later_end_grants_what_is_left(local_backend):
    with FakeClock() as time:
        attempt = LeaseRequest("a", "one", 90.0)
        local_backend.acquire(attempt, deadline=time() + 1)
        for shorten, left in ((0, 90.0), (1, 30.0)):
            renewal = Renewal("a", "one", 30.0, shorten)
            local_backend.renew([renewal], process=current().id, deadline=time() + 1)
            info = local_backend.get("a")
            assert (info.ttl, info.granted_ttl) == pytest.approx((left, left))
        # A repeated request grants the whole TTL again.
        local_backend.acquire(attempt, deadline=time() + 1)
        info = local_backend.get("a")
        assert (info.ttl, info.granted_ttl) == pytest.approx((90.0, 90.0))


def test_a_request_that_was_granted_before_is_told_to_begin_anew(local_backend):
    deadline = local_backend.call_deadline()
    over, cancelled = LeaseRequest("a", "one", 30.0), LeaseRequest("a", "two", 30.0)
    local_backend.acquire(over, deadline=deadline)
    local_backend.release("a", "one", min_hold=0.0, deadline=deadline)
    local_backend.cancel_acquire(cancelled, deadline=deadline)
    local_backend.acquire(LeaseRequest("a", "three", 30.0), deadline=deadline)
    assert local_backend.acquire(over, deadline=deadline).owner == ""
    assert local_backend.acquire(cancelled, deadline=deadline).owner == "three"


def test_a_cancelled_request_that_had_no_lease_has_released_none(local_backend):
    deadline = local_backend.call_deadline()
    local_backend.cancel_acquire(LeaseRequest("a", "one", 30.0), deadline=deadline)
    assert local_backend.release("a", "one", min_hold=0.0, deadline=deadline) == "refused"
    local_backend.acquire(LeaseRequest("a", "two", 30.0), deadline=deadline)
    local_backend.cancel_acquire(LeaseRequest("a", "two", 30.0), deadline=deadline)
    assert local_backend.release("a", "two", min_hold=0.0, deadline=deadline) == "released"
