"""The rules of ``django_dlock.backends.base``, one test each."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

from .. import clock
from ..backends.base import BaseLockBackend
from ..lease import Lease, Renewal
from ..process import current
from .contract_operators import OperatorContract

__all__ = ["BackendContract"]


class BackendContract(OperatorContract):
    """Subclassed in a backend's tests; needs a fixture ``backend``."""

    # -- acquire -----------------------------------------------------------------------

    def test_a_held_name_is_not_granted_to_another(self, backend: BaseLockBackend) -> None:
        name = self.name()
        lease = self.grant(backend, self.request(name, ttl=30))
        met = self.refuse(backend, self.request(name))
        assert met.owner == lease.owner
        assert met.kind == "held"
        assert 0 < met.remaining <= 30.1
        assert met.process == current()

    def test_different_names_do_not_exclude_each_other(self, backend: BaseLockBackend) -> None:
        self.grant(backend, self.request(self.name()))
        self.grant(backend, self.request(self.name()))

    def test_names_are_compared_exactly(self, backend: BaseLockBackend) -> None:
        base = self.name()
        endings = [
            "straße",
            "strasse",
            "STRASSE",
            "é",
            "e\u0301",
            "e",
            "\u0131",
            "i",
            " ",
            "",
            "{a}",
            "日本",
        ]
        for ending in endings:
            self.grant(backend, self.request(base + ending))
        for ending in endings:
            self.refuse(backend, self.request(base + ending))

    def test_a_name_of_255_characters_is_taken(self, backend: BaseLockBackend) -> None:
        name = (self.name() + "ü" * 255)[:255]
        self.grant(backend, self.request(name))
        self.refuse(backend, self.request(name))

    def test_g5_a_repeated_acquire_finds_its_own_grant(self, backend: BaseLockBackend) -> None:
        request = self.request(self.name())
        first = self.grant(backend, request)
        second = self.grant(backend, request)
        assert (second.owner, second.token) == (first.owner, first.token)
        assert second.deadline >= first.deadline

    def test_a_lease_passes_to_one_who_names_its_owner(self, backend: BaseLockBackend) -> None:
        parked = self.grant(backend, self.request(self.name(), kind="parked"))
        self.refuse(backend, self.request(parked.name))
        self.refuse(backend, self.request(parked.name, replaces="somebody else"))
        request = self.request(parked.name, replaces=parked.owner)
        lease = self.grant(backend, request)
        # The reply was lost, and the attempt is repeated.
        assert self.grant(backend, request).token == lease.token > parked.token
        # One who comes second with the same owner is too late.
        self.refuse(backend, self.request(parked.name, replaces=parked.owner))
        assert self.renew(backend, parked) == ["released"]
        assert self.release(backend, parked) == "released"
        assert self.release(backend, lease) == "released"

    def test_who_names_an_owner_is_granted_a_free_name_too(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name(), replaces="somebody"))
        assert self.release(backend, lease) == "released"

    def test_g7_an_undone_attempt_replaces_nobody(self, backend: BaseLockBackend) -> None:
        parked = self.grant(backend, self.request(self.name(), kind="parked"))
        request = self.request(parked.name, replaces=parked.owner)
        backend.undo(request, deadline=self.soon(backend))
        assert self.refuse(backend, request).owner == parked.owner

    def test_g5_a_repeated_acquire_after_its_release_grants_nothing(
        self, backend: BaseLockBackend
    ) -> None:
        # attempt ──► granted ──► released ──► late copy of the attempt ──► an orphan
        request = self.request(self.name())
        self.release(backend, self.grant(backend, request))
        self.refuse(backend, request)
        assert not self.locked(backend, request.name)

    def test_g9_the_local_deadline_counts_from_before_the_request(
        self, backend: BaseLockBackend
    ) -> None:
        before = clock.now()
        lease = self.grant(backend, self.request(self.name(), ttl=10))
        ttl = 10 * (1 - clock.DRIFT)
        assert before + ttl <= lease.deadline <= clock.now() + ttl
        assert lease.ttl == 10

    def test_g3_tokens_rise_from_grant_to_grant(self, backend: BaseLockBackend) -> None:
        name, tokens = self.name(), []
        for _ in range(10):
            lease = self.grant(backend, self.request(name))
            tokens.append(lease.token)
            self.release(backend, lease)
        assert tokens == sorted(set(tokens))

    def test_g4_a_lease_ends_with_its_ttl(self, backend: BaseLockBackend) -> None:
        name = self.name()
        first = self.grant(backend, self.request(name, ttl=self.SHORT))
        self.outlive(backend, name)
        second = self.grant(backend, self.request(name))
        assert second.token > first.token

    # -- renew -------------------------------------------------------------------------

    def test_g1_a_renewed_lease_outlives_its_first_ttl(self, backend: BaseLockBackend) -> None:
        renewed, left = self.name(), self.name()
        lease = self.grant(backend, self.request(renewed, ttl=self.SHORT))
        self.grant(backend, self.request(left, ttl=self.SHORT))
        assert self.renew(backend, lease) == ["renewed"]
        self.outlive(backend, left)
        assert self.locked(backend, renewed)

    def test_many_leases_are_renewed_in_order(self, backend: BaseLockBackend) -> None:
        held = self.grant(backend, self.request(self.name()))
        freed = self.grant(backend, self.request(self.name()))
        self.release(backend, freed)
        over = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.outlive(backend, over.name)
        broken = self.grant(backend, self.request(self.name()))
        assert backend.break_(broken.name, owner=broken.owner)
        never = Lease(self.name(), "nobody", 1, 30.0, math.inf)
        assert self.renew(backend, held, freed, over, broken, never, held) == [
            "renewed",
            "released",
            "expired",
            "broken",
            "refused",
            "renewed",
        ]

    def test_g2_the_renewal_of_a_lease_taken_over_is_told(self, backend: BaseLockBackend) -> None:
        name = self.name()
        first = self.grant(backend, self.request(name, ttl=self.SHORT))
        self.outlive(backend, name)
        second = self.grant(backend, self.request(name))
        assert self.renew(backend, first)[0] in {"expired", "refused"}
        assert self.renew(backend, second) == ["renewed"]

    def test_g1_a_renewal_overtaken_by_a_longer_one_takes_nothing_away(
        self, backend: BaseLockBackend
    ) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=5))
        for ttl in (600, 30, 5):
            assert self.renew(backend, lease, ttl=ttl) == ["renewed"]
        met = self.refuse(backend, self.request(lease.name))
        assert 590 < met.remaining <= 600.1

    def test_a_reservation_is_prolonged_until_it_is_given_back(
        self, backend: BaseLockBackend
    ) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=5, kind="reserved"))
        assert self.refuse(backend, self.request(lease.name)).remaining <= 5.1
        assert self.renew(backend, lease, ttl=600) == ["renewed"]
        met = self.refuse(backend, self.request(lease.name))
        assert (met.kind, met.owner) == ("reserved", lease.owner)
        assert 590 < met.remaining <= 600.1
        self.release(backend, lease)
        # The late confirmation of a slow publisher.
        assert self.renew(backend, lease, ttl=600) == ["released"]
        assert not self.locked(backend, lease.name)

    def test_an_expired_lease_is_not_revived_by_its_renewal(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.outlive(backend, lease.name)
        self.renew(backend, lease)
        assert not self.locked(backend, lease.name)

    def test_a_renewal_without_leases_is_a_heartbeat(self, backend: BaseLockBackend) -> None:
        assert self.renew(backend) == []

    def test_1200_leases_are_renewed_in_one_call(self, backend: BaseLockBackend) -> None:
        leases = [self.grant(backend, self.request(self.name())) for _ in range(1200)]
        assert self.renew(backend, *leases) == ["renewed"] * 1200
        pending = self._start_renew(backend, *leases)
        assert pending.result() == ["renewed"] * 1200
        for lease in leases:
            self.release(backend, lease)

    def _start_renew(self, backend: BaseLockBackend, *leases: Lease) -> Any:
        renewals = [Renewal(lease.name, lease.owner, 30.0) for lease in leases]
        return backend.start_renew(renewals, process=current().id, deadline=self.soon(backend))

    def test_a_renewal_is_sent_and_read_apart(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        for _ in range(3):
            pending = self._start_renew(backend, lease)
            assert pending.wait(self.PATIENCE)
            assert pending.result() == ["renewed"]

    def test_an_abandoned_renewal_disturbs_no_later_call(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        self._start_renew(backend, lease).abandon()
        assert self.renew(backend, lease, lease) == ["renewed", "renewed"]
        assert self.release(backend, lease) == "released"

    # -- release and undo --------------------------------------------------------------

    def test_a_released_name_is_free_at_once(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        assert self.locked(backend, lease.name)
        assert self.release(backend, lease) == "released"
        assert not self.locked(backend, lease.name)
        self.grant(backend, self.request(lease.name))

    def test_g5_a_repeated_release_is_a_success(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        assert self.release(backend, lease) == "released"
        assert self.release(backend, lease) == "released"

    def test_late_release_does_not_free_the_next_holder(self, backend: BaseLockBackend) -> None:
        name = self.name()
        late = self.grant(backend, self.request(name, ttl=self.SHORT))
        self.outlive(backend, name)
        holder = self.grant(backend, self.request(name))
        assert self.release(backend, late) in {"expired", "refused"}
        assert self.locked(backend, name)
        assert self.renew(backend, holder) == ["renewed"]

    def test_g5_a_release_tells_an_expired_and_a_broken_lease_apart(
        self, backend: BaseLockBackend
    ) -> None:
        over = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.outlive(backend, over.name)
        assert self.release(backend, over) == "expired"
        broken = self.grant(backend, self.request(self.name()))
        backend.break_(broken.name, owner=broken.owner)
        assert self.release(backend, broken) == "broken"

    def test_the_release_of_a_name_never_held_is_refused(self, backend: BaseLockBackend) -> None:
        fate = backend.release(self.name(), "nobody", min_hold=0.0, deadline=self.soon(backend))
        assert fate == "refused"

    def test_g7_an_undone_grant_is_free(self, backend: BaseLockBackend) -> None:
        request = self.request(self.name())
        self.grant(backend, request)
        backend.undo(request, deadline=self.soon(backend))
        assert not self.locked(backend, request.name)
        self.grant(backend, self.request(request.name))

    def test_g7_an_attempt_undone_before_it_arrives_is_never_granted(
        self, backend: BaseLockBackend
    ) -> None:
        request = self.request(self.name())
        backend.undo(request, deadline=self.soon(backend))
        self.refuse(backend, request)
        self.refuse(backend, request)
        assert not self.locked(backend, request.name)
        self.grant(backend, self.request(request.name))

    def test_the_undo_of_a_refused_attempt_leaves_the_holder_alone(
        self, backend: BaseLockBackend
    ) -> None:
        lease = self.grant(backend, self.request(self.name()))
        other = self.request(lease.name, waits=True)
        self.refuse(backend, other)
        backend.undo(other, deadline=self.soon(backend))
        assert self.renew(backend, lease) == ["renewed"]

    def test_min_hold_keeps_the_name_taken_after_its_release(
        self, backend: BaseLockBackend
    ) -> None:
        lease = self.grant(backend, self.request(self.name()))
        assert self.release(backend, lease, min_hold=self.SHORT) == "released"
        met = self.refuse(backend, self.request(lease.name))
        assert met.kind == "cooling"
        assert met.remaining <= self.SHORT
        assert self.locked(backend, lease.name)
        assert self.release(backend, lease) == "released"
        assert self.renew(backend, lease) == ["released"]
        self.outlive(backend, lease.name)
        assert backend.last_end(lease.name) == (lease.owner, "released")

    def test_min_hold_counts_from_the_grant(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        other = self.name()
        self.grant(backend, self.request(other, ttl=self.SHORT))
        self.outlive(backend, other)
        self.release(backend, lease, min_hold=self.SHORT)
        assert not self.locked(backend, lease.name)

    # -- waiting -----------------------------------------------------------------------

    def test_a_waiter_is_woken_by_the_release(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        request = self.request(lease.name, waits=True)
        met = self.refuse(backend, request)
        waiter = self.in_thread(lambda: self.wait(backend, request, met))
        assert self.release(backend, lease) == "released"
        handed_over = waiter()
        if handed_over is None:
            handed_over = self.grant(backend, request)
        assert handed_over.token > lease.token

    def test_a_waiter_is_woken_by_a_break(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        request = self.request(lease.name, waits=True)
        met = self.refuse(backend, request)
        waiter = self.in_thread(lambda: self.wait(backend, request, met))
        assert backend.break_(lease.name, owner=lease.owner)
        if waiter() is None:
            self.grant(backend, request)

    def test_an_undone_waiter_passes_the_wake_up_on(self, backend: BaseLockBackend) -> None:
        # release ──► wakes the first ──► which is interrupted before it tries ──► the second
        # would sleep until the end of a lease that is over
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        first, second = (self.request(lease.name, waits=True) for _ in range(2))
        met_first, met_second = self.refuse(backend, first), self.refuse(backend, second)
        self.release(backend, lease)
        if self.wait(backend, first, met_first) is not None:
            return  # Handed over directly; there is no wake-up to be lost.
        waiter = self.in_thread(lambda: self.wait(backend, second, met_second))
        backend.undo(first, deadline=self.soon(backend))
        if waiter() is None:
            self.grant(backend, second)

    def test_a_waiter_stops_when_it_is_interrupted(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        request = self.request(lease.name, waits=True)
        met = self.refuse(backend, request)
        asked = threading.Event()

        def interrupted() -> bool:
            asked.set()
            return True

        until = clock.now() + self.PATIENCE
        while not asked.is_set():
            assert (
                backend.wait(request, met, until=until, deadline=until + 1, interrupted=interrupted)
                is None
            )
            assert clock.now() < until
            met = self.refuse(backend, request)

    def test_a_waiter_sleeps_no_longer_than_the_lease_in_its_way(
        self, backend: BaseLockBackend
    ) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.acquire_waiting(backend, self.request(lease.name, waits=True))

    def test_g1_the_count_under_the_lock_is_exact(self, backend: BaseLockBackend) -> None:
        name, counter, tokens = self.name(), [0], list[int]()

        def work() -> None:
            for _ in range(15):
                lease = self.acquire_waiting(backend, self.request(name, waits=True))
                seen = counter[0]
                tokens.append(lease.token)
                threading.Event().wait(0.0005)
                counter[0] = seen + 1
                self.release(backend, lease)

        for result in [self.in_thread(work) for _ in range(6)]:
            result()
        assert counter == [90]
        assert tokens == sorted(set(tokens))

    # -- processes ---------------------------------------------------------------------

    def test_g4_a_process_that_said_goodbye_is_dead(self, backend: BaseLockBackend) -> None:
        self.needs_listing(backend)
        lease = self.grant(backend, self.request(self.name()))
        backend.goodbye(current().id, deadline=self.soon(backend))
        info = backend.get(lease.name)
        assert info is not None
        assert info.holder_state == "dead"
        self.release(backend, lease)
        self.renew(backend)

    def test_g8_a_forked_child_locks_and_leaves_the_parent_its_lease(
        self, backend: BaseLockBackend
    ) -> None:
        lease = self.grant(backend, self.request(self.name()))
        own = self.request(self.name())
        pid = os.fork()
        if pid == 0:
            # Nothing of the test runner may run in the child: it leaves by ``_exit`` only.
            status = 1
            try:
                backend.after_fork()
                answer = backend.acquire(own, deadline=self.soon(backend))
                status = 0 if isinstance(answer, Lease) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert self.renew(backend, lease) == ["renewed"]
        assert self.locked(backend, own.name) == backend.is_shared
        assert self.release(backend, lease) == "released"

    def test_a_closed_backend_may_be_used_again(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        backend.close()
        assert self.release(backend, lease) == "released"
