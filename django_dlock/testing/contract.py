"""Tests of the contract for acquire and release; ``BackendContract`` adds the other parts."""

from __future__ import annotations

from .. import clock
from ..backends.base import BaseLockBackend
from ..lease import ReleaseRequest
from ..process import current
from .contract_operators import OperatorContract
from .contract_processes import ProcessContract
from .contract_renewals import RenewalContract
from .contract_waiting import WaitingContract

__all__ = ["BackendContract"]


class BackendContract(RenewalContract, OperatorContract, WaitingContract, ProcessContract):
    """Subclass it in a backend's tests, with a fixture ``backend``.

    The *store* is what keeps the leases; the *backend* is the class that talks to it. Each test
    says why every store must pass it: the outcome depends on the store, or on its backend. What
    the package decides by itself is not here, such as when it renews a lease.
    """

    # -- acquire -----------------------------------------------------------------------

    def test_a_held_name_is_not_granted_to_another(self, backend: BaseLockBackend) -> None:
        """On every store: one step of the store must both look and grant."""
        name = self.name()
        lease = self.grant(backend, self.request(name, ttl=30))
        met = self.refuse(backend, self.request(name))
        assert met.owner == lease.owner
        assert met.kind == "held"
        assert 0 < met.remaining <= 30.1
        assert met.process in {None, current()}

    def test_names_are_compared_exactly(self, backend: BaseLockBackend) -> None:
        """On every store: a store may fold case or accents, or cut a name at a brace."""
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
        """On every store: the store limits the length of its keys, often in bytes."""
        name = (self.name() + "ü" * 255)[:255]
        self.grant(backend, self.request(name))
        self.refuse(backend, self.request(name))

    def test_g5_a_repeated_acquire_finds_its_own_grant(self, backend: BaseLockBackend) -> None:
        """On every store: the store itself must recognize the owner."""
        request = self.request(self.name())
        first = self.grant(backend, request)
        second = self.grant(backend, request)
        assert (second.owner, second.token) == (first.owner, first.token)
        assert second.deadline >= first.deadline

    def test_a_lease_passes_to_a_request_that_names_its_owner(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store compares and replaces the owner in one step."""
        self.needs(backend, "parking")
        parked = self.grant(backend, self.request(self.name(), kind="parked"))
        self.refuse(backend, self.request(parked.name))
        self.refuse(backend, self.request(parked.name, replaces="somebody else"))
        request = self.request(parked.name, replaces=parked.owner)
        lease = self.grant(backend, request)
        # The reply was lost, and the request is repeated.
        assert self.grant(backend, request).token == lease.token > parked.token
        # A second request that replaces the same owner is too late.
        self.refuse(backend, self.request(parked.name, replaces=parked.owner))
        assert self.renew(backend, parked)[0] in {self.outcome(backend, "released"), "refused"}
        assert self.release(backend, parked) == self.outcome(backend, "released")
        assert self.release(backend, lease) == "released"

    def test_g4_a_waiter_to_whom_a_lease_was_passed_waits_no_longer(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store keeps the queue of waiters."""
        # waits ──► the holder passes its lease on ──► the waiter takes it, and releases it: if the
        # waiter were still in the queue, it would get the lease again, and nobody would know
        self.needs(backend, "parking")
        lease = self.grant(backend, self.request(self.name()))
        parked = self.request(lease.name, kind="parked", replaces=lease.owner)
        request = self.request(lease.name, replaces=parked.owner, waits=True)
        self.refuse(backend, request)
        self.grant(backend, parked)
        assert self.release(backend, self.grant(backend, request)) == "released"
        self.grant(backend, self.request(lease.name))

    def test_a_request_that_names_an_owner_is_granted_a_free_name_too(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: this is another branch of the store's acquire."""
        self.needs(backend, "parking")
        lease = self.grant(backend, self.request(self.name(), replaces="somebody"))
        assert self.release(backend, lease) == "released"

    def test_g7_a_cancelled_attempt_replaces_nobody(self, backend: BaseLockBackend) -> None:
        """On every store: a cancelled attempt must not replace an owner either."""
        self.needs(backend, "parking", "memory_of_ends")
        parked = self.grant(backend, self.request(self.name(), kind="parked"))
        request = self.request(parked.name, replaces=parked.owner)
        backend.cancel_acquire(request, deadline=self.soon(backend))
        assert self.refuse(backend, request).owner == parked.owner

    def test_g5_a_repeated_acquire_after_its_release_grants_nothing(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: a late copy is refused only if the store remembers the attempt."""
        # attempt ──► granted ──► released ──► late copy of the attempt ──► an orphan
        self.needs(backend, "memory_of_ends")
        request = self.request(self.name())
        self.release(backend, self.grant(backend, request))
        self.refuse(backend, request)
        assert not self.locked(backend, request.name)

    def test_g5_a_late_acquire_after_two_others_turns_grants_nothing(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store remembers more than the last owner."""
        self.needs(backend, "memory_of_ends")
        request = self.request(self.name())
        self.release(backend, self.grant(backend, request))
        for _ in range(2):
            self.release(backend, self.grant(backend, self.request(request.name)))
        self.refuse(backend, request)
        assert not self.locked(backend, request.name)

    def test_g5_a_repeated_acquire_after_its_expiry_grants_nothing(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: nothing happens at the store when a lease expires."""
        self.needs(backend, "memory_of_ends")
        request = self.request(self.name(), ttl=self.SHORT)
        self.grant(backend, request)
        self.outlive(backend, request.name)
        # Without an owner, so that the caller goes on with a new request.
        assert self.refuse(backend, request).owner == ""
        assert not self.locked(backend, request.name)
        self.grant(backend, self.request(request.name))
        assert self.refuse(backend, request).owner == ""

    def test_g9_a_lease_counts_from_before_its_request(self, backend: BaseLockBackend) -> None:
        """On every store: the backend reads the clock before it sends."""
        before = clock.now()
        lease = self.grant(backend, self.request(self.name(), ttl=10))
        assert before <= lease.asked_at <= clock.now()
        assert 0 < lease.ttl <= 10
        remaining = self.remaining(backend, lease.name)
        assert remaining <= lease.ttl + 0.1
        # The lease counts from a time before the request, so the store ends it later.
        assert lease.deadline <= clock.now() + remaining

    def test_g1_a_lease_lives_for_as_long_as_it_was_granted(self, backend: BaseLockBackend) -> None:
        """On every store: the store's own clock, in its own unit, ends the lease."""
        # For longer than its first TTL, of which a renewal must not leave the end where it was.
        renewed, ends_at = self.grant_and_renew(backend, 2 * self.SHORT)
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        living = {renewed.name: ends_at, lease.name: lease.deadline}
        while living:
            for name, deadline in list(living.items()):
                locked = self.locked(backend, name)
                if clock.now() < deadline:
                    assert locked
                elif not locked:
                    del living[name]

    def test_g3_tokens_rise_from_grant_to_grant(self, backend: BaseLockBackend) -> None:
        """On every store: each store makes its tokens in a way of its own."""
        name, tokens = self.name(), []
        for _ in range(10):
            lease = self.grant(backend, self.request(name))
            tokens.append(lease.token)
            self.release(backend, lease)
        assert tokens == sorted(set(tokens))

    def test_g4_a_lease_ends_with_its_ttl(self, backend: BaseLockBackend) -> None:
        """On every store: the store ends a lease that nobody renews."""
        name = self.name()
        first = self.grant(backend, self.request(name, ttl=self.SHORT))
        self.outlive(backend, name)
        second = self.grant(backend, self.request(name))
        assert second.token > first.token

    # -- release and cancel ------------------------------------------------------------

    def test_a_released_name_is_free_at_once(self, backend: BaseLockBackend) -> None:
        """On every store: a release takes effect in the store before it answers."""
        lease = self.grant(backend, self.request(self.name()))
        assert self.locked(backend, lease.name)
        assert self.release(backend, lease) == "released"
        assert not self.locked(backend, lease.name)
        self.grant(backend, self.request(lease.name))

    def test_g5_a_repeated_release_is_no_loss(self, backend: BaseLockBackend) -> None:
        """On every store: what the store remembers decides the answer."""
        lease = self.grant(backend, self.request(self.name()))
        assert self.release(backend, lease) == "released"
        assert self.release(backend, lease) == self.outcome(backend, "released")
        self.release(backend, self.grant(backend, self.request(lease.name)))
        self.grant(backend, self.request(lease.name))
        # Two other owners have had the name since.
        assert self.release(backend, lease) == self.outcome(backend, "released")
        assert self.locked(backend, lease.name)

    def test_late_release_does_not_free_the_next_holder(self, backend: BaseLockBackend) -> None:
        """On every store: the store's release compares the owner."""
        name = self.name()
        late = self.grant(backend, self.request(name, ttl=self.SHORT))
        self.outlive(backend, name)
        holder = self.grant(backend, self.request(name))
        assert self.release(backend, late) in {self.outcome(backend, "expired"), "refused"}
        assert self.locked(backend, name)
        assert self.renew(backend, holder) == ["renewed"]

    def test_g5_a_release_tells_an_expired_and_a_broken_lease_apart(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store notes how each lease ended."""
        self.needs(backend, "memory_of_ends")
        over = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.outlive(backend, over.name)
        assert self.release(backend, over) == "expired"
        broken = self.grant(backend, self.request(self.name()))
        backend.break_silently(broken.name, owner=broken.owner)
        assert self.release(backend, broken) == "broken"

    def test_each_of_many_releases_has_an_outcome_of_its_own(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: a store may release many in one command of its own."""
        lease = self.grant(backend, self.request(self.name()))
        other = self.grant(backend, self.request(self.name()))
        releases = [
            ReleaseRequest(other.name, "nobody"),
            ReleaseRequest(lease.name, lease.owner),
        ]
        assert self.release_many(backend, releases)[1] == "released"
        assert not self.locked(backend, lease.name)
        assert self.locked(backend, other.name)
        assert self.release_many(backend, []) == []

    def test_the_release_of_a_name_never_held_is_refused(self, backend: BaseLockBackend) -> None:
        """On every store: the store has no record of the name, so another branch answers."""
        outcome = backend.release(self.name(), "nobody", min_hold=0.0, deadline=self.soon(backend))
        assert outcome == self.outcome(backend, "refused")

    def test_g7_a_cancelled_grant_is_free(self, backend: BaseLockBackend) -> None:
        """On every store: the store must find the grant by its owner, as no token is known."""
        request = self.request(self.name())
        self.grant(backend, request)
        backend.cancel_acquire(request, deadline=self.soon(backend))
        assert not self.locked(backend, request.name)
        self.grant(backend, self.request(request.name))

    def test_g7_an_attempt_cancelled_before_it_arrives_is_never_granted(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store must remember a cancellation that comes before its attempt."""
        self.needs(backend, "memory_of_ends")
        request = self.request(self.name())
        backend.cancel_acquire(request, deadline=self.soon(backend))
        self.refuse(backend, request)
        self.refuse(backend, request)
        assert not self.locked(backend, request.name)
        self.grant(backend, self.request(request.name))

    def test_the_cancellation_of_a_refused_attempt_leaves_the_holder_alone(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store's cancellation compares the owner."""
        lease = self.grant(backend, self.request(self.name()))
        other = self.request(lease.name, waits=True)
        self.refuse(backend, other)
        backend.cancel_acquire(other, deadline=self.soon(backend))
        assert self.renew(backend, lease) == ["renewed"]

    def test_min_hold_keeps_the_name_taken_after_its_release(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store turns the lease into one without an owner."""
        self.needs(backend, "min_hold")
        long = self.grant(backend, self.request(self.name(), ttl=3 * self.PATIENCE))
        assert self.release(backend, long, min_hold=2 * self.PATIENCE) == "released"
        met = self.refuse(backend, self.request(long.name))
        assert met.kind == "cooling"
        assert met.remaining <= 2 * self.PATIENCE
        assert self.locked(backend, long.name)
        assert self.release(backend, long) == self.outcome(backend, "released")
        assert self.renew(backend, long) == [self.outcome(backend, "released")]
        short = self.grant(backend, self.request(self.name(), ttl=3 * self.PATIENCE))
        assert self.release(backend, short, min_hold=self.SHORT) == "released"
        self.outlive(backend, short.name)
        assert self.renew(backend, short) == [self.outcome(backend, "released")]

    def test_g5_a_release_is_no_loss_although_the_cooling_name_was_broken(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: the store must not note the break as the end of the lease."""
        self.needs(backend, "min_hold", "memory_of_ends")
        lease = self.grant(backend, self.request(self.name()))
        assert self.release(backend, lease, min_hold=2 * self.PATIENCE) == "released"
        assert backend.break_silently(lease.name, owner=lease.owner)
        for _ in range(2):
            # As if the first reply had been lost.
            assert self.release(backend, lease) == "released"
            assert self.renew(backend, lease) == ["released"]
            self.grant(backend, self.request(lease.name, ttl=self.SHORT))
            self.outlive(backend, lease.name)

    def test_min_hold_counts_from_the_grant(self, backend: BaseLockBackend) -> None:
        """On every store: the store must count from the grant, and not from the release."""
        self.needs(backend, "min_hold")
        over, cooling = (
            self.grant(backend, self.request(self.name(), ttl=3 * self.PATIENCE)) for _ in range(2)
        )
        other = self.name()
        self.grant(backend, self.request(other, ttl=self.SHORT))
        self.outlive(backend, other)
        self.release(backend, over, min_hold=self.SHORT)
        assert not self.locked(backend, over.name)
        self.release(backend, cooling, min_hold=2 * self.PATIENCE)
        # Parts of a store may differ by a moment about when they granted it.
        assert self.remaining(backend, cooling.name) <= 2 * self.PATIENCE - self.SHORT / 2
