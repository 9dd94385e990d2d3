"""The rules for renewals: which leases they prolong, and by how much."""

from __future__ import annotations

import math
from typing import Any

from ..backends.base import BaseLockBackend
from ..lease import Lease, ReleaseRequest, Renewal
from ..process import current
from .tools import ContractTools

__all__ = ["RenewalContract"]


class RenewalContract(ContractTools):
    """A part of ``BackendContract``."""

    def test_g1_a_renewed_lease_outlives_its_first_ttl(self, backend: BaseLockBackend) -> None:
        """On every store: the store must move the end of the lease."""
        renewed, _ = self.grant_and_renew(backend, 10 * self.PATIENCE)
        # Granted later for as long, so it ends after the first TTL of the other.
        left = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.outlive(backend, left.name)
        assert self.locked(backend, renewed.name)

    def test_many_leases_are_renewed_in_order(self, backend: BaseLockBackend) -> None:
        """On every store: one command renews many leases, and must answer for each of them."""
        held = self.grant(backend, self.request(self.name()))
        freed = self.grant(backend, self.request(self.name()))
        self.release(backend, freed)
        over = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.outlive(backend, over.name)
        broken = self.grant(backend, self.request(self.name()))
        assert backend.break_silently(broken.name, owner=broken.owner)
        never = Lease(self.name(), "nobody", 1, 30.0, math.inf)
        assert self.renew(backend, held, freed, over, broken, never, held) == [
            "renewed",
            self.outcome(backend, "released"),
            self.outcome(backend, "expired"),
            self.outcome(backend, "broken"),
            self.outcome(backend, "refused"),
            "renewed",
        ]

    def test_g2_the_renewal_of_a_lease_taken_over_is_told(self, backend: BaseLockBackend) -> None:
        """On every store: the store's renewal compares the owner."""
        name = self.name()
        first = self.grant(backend, self.request(name, ttl=self.SHORT))
        self.outlive(backend, name)
        second = self.grant(backend, self.request(name))
        assert self.renew(backend, first)[0] in {self.outcome(backend, "expired"), "refused"}
        assert self.renew(backend, second) == ["renewed"]

    def test_g1_a_renewal_overtaken_by_a_longer_one_takes_nothing_away(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store keeps the later of two ends."""
        lease = self.grant(backend, self.request(self.name(), ttl=5))
        granted = self.prolong(backend, lease, 600).ttl
        for ttl in (30, 5):
            assert self.prolong(backend, lease, ttl).outcome == "renewed"
        assert granted - 10 < self.remaining(backend, lease.name) <= granted + 0.1

    def test_a_renewal_in_which_the_holder_names_a_shorter_ttl_counts(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store notes the number of the renewal."""
        for name in (self.name(), self.name()):
            # In the second round, an earlier owner of the name has done the same.
            for _ in range(2):
                lease = self.grant(backend, self.request(name, ttl=600))
                assert self.prolong(backend, lease, 5, number=1).outcome == "renewed"
                assert self.remaining(backend, name) <= 5.1
                self.release(backend, lease)

    def test_g1_a_renewal_by_the_holder_cuts_a_lease_to_no_less_than_it_names(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: a store that rounds or shortens must not cut more."""
        # The granted TTL may be shorter than requested, and the holder may miss the answer.
        lease = self.grant(backend, self.request(self.name(), ttl=600))
        named = 0.9 * lease.ttl
        assert self.prolong(backend, lease, named, number=1).outcome == "renewed"
        assert named - 10 < self.remaining(backend, lease.name) <= named + 0.1

    def test_g1_a_late_copy_of_a_holders_shorter_renewal_takes_nothing_away(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store compares the numbers."""
        lease = self.grant(backend, self.request(self.name(), ttl=600))
        self.prolong(backend, lease, 5, number=1)
        granted = self.prolong(backend, lease, 600, number=2).ttl
        assert self.prolong(backend, lease, 5, number=1).outcome == "renewed"
        assert granted - 10 < self.remaining(backend, lease.name) <= granted + 0.1

    def test_a_reservation_is_prolonged_until_it_is_released(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store may treat each kind of lease differently."""
        self.needs(backend, "reservations")
        lease = self.grant(backend, self.request(self.name(), ttl=5, kind="reserved"))
        assert self.remaining(backend, lease.name) <= 5.1
        granted = self.prolong(backend, lease, 600).ttl
        met = self.refuse(backend, self.request(lease.name))
        assert (met.kind, met.owner) == ("reserved", lease.owner)
        assert granted - 10 < met.remaining <= granted + 0.1
        self.release(backend, lease)
        # A slow publisher confirms too late.
        assert self.renew(backend, lease, ttl=600) == [self.outcome(backend, "released")]
        assert not self.locked(backend, lease.name)

    def test_an_expired_lease_is_not_revived_by_its_renewal(self, backend: BaseLockBackend) -> None:
        """On every store: a store that keeps ended leases must compare their end."""
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.outlive(backend, lease.name)
        self.renew(backend, lease)
        assert not self.locked(backend, lease.name)

    def test_a_renewal_without_leases_is_a_heartbeat(self, backend: BaseLockBackend) -> None:
        """On every store: many commands fail on an empty list."""
        assert self.renew(backend) == []

    def test_many_leases_are_renewed_and_released_in_one_call(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store limits what one command can take."""
        many = backend.renewals_per_call
        leases = [self.grant(backend, self.request(self.name())) for _ in range(many)]
        assert self.renew(backend, *leases) == ["renewed"] * many
        pending = self._start_renew(backend, *leases)
        assert [result.outcome for result in pending.result()] == ["renewed"] * many
        releases = [ReleaseRequest(lease.name, lease.owner) for lease in leases]
        assert self.release_many(backend, releases) == ["released"] * many

    def _start_renew(self, backend: BaseLockBackend, *leases: Lease) -> Any:
        renewals = [Renewal(lease.name, lease.owner, 30.0) for lease in leases]
        return backend.start_renew(renewals, process=current().id, deadline=self.soon(backend))

    def test_a_renewal_is_sent_and_read_apart(self, backend: BaseLockBackend) -> None:
        """On every store: a backend may send and read with code of its own."""
        lease = self.grant(backend, self.request(self.name()))
        for _ in range(3):
            pending = self._start_renew(backend, lease)
            assert pending.wait(self.PATIENCE)
            (result,) = pending.result()
            assert result.outcome == "renewed"
            assert result.ttl > 0

    def test_an_abandoned_renewal_disturbs_no_later_call(self, backend: BaseLockBackend) -> None:
        """On every store: the late answer arrives on a connection that is used again."""
        lease = self.grant(backend, self.request(self.name()))
        self._start_renew(backend, lease).abandon()
        assert self.renew(backend, lease, lease) == ["renewed", "renewed"]
        assert self.release(backend, lease) == "released"
