"""The rules for waiters, for coroutines and for processes that end or fork."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from .. import clock
from ..backends.base import BaseLockBackend
from ..lease import LeaseRequest
from ..process import current
from .tools import ContractTools

__all__ = ["ProcessContract"]


class ProcessContract(ContractTools):
    """A part of ``BackendContract``."""

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

    def test_a_cancelled_waiter_passes_the_wake_up_on(self, backend: BaseLockBackend) -> None:
        # release ──► wakes the first ──► which is interrupted before it tries ──► the second
        # would sleep until the end of a lease that is over
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        first, second = (self.request(lease.name, waits=True) for _ in range(2))
        met_first, met_second = self.refuse(backend, first), self.refuse(backend, second)
        self.release(backend, lease)
        if self.wait(backend, first, met_first) is not None:
            return  # Handed over directly, so there is no wake-up that could be lost.
        waiter = self.in_thread(lambda: self.wait(backend, second, met_second))
        backend.cancel_acquire(first, deadline=self.soon(backend))
        if waiter() is None:
            self.grant(backend, second)

    def test_a_waiter_stops_when_it_is_interrupted(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        request = self.request(lease.name, waits=True)
        until = clock.now() + self.PATIENCE
        # The wait may have ended for another reason.
        for _ in range(3):
            met = self.refuse(backend, request)
            assert backend.wait(request, met, until=until, interrupted=lambda: True) is None
            assert clock.now() < until

    def test_a_waiter_sleeps_no_longer_than_the_lease_in_its_way(
        self, backend: BaseLockBackend
    ) -> None:
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.acquire_waiting(backend, self.request(lease.name, waits=True))

    def test_g1_the_count_under_the_lock_is_exact(self, backend: BaseLockBackend) -> None:
        name, counter, tokens = self.name(), [0], list[int]()

        def work() -> None:
            for _ in range(6):
                lease = self.acquire_waiting(backend, self.request(name, waits=True))
                seen = counter[0]
                tokens.append(lease.token)
                threading.Event().wait(0.0005)
                counter[0] = seen + 1
                self.release(backend, lease)

        for result in [self.in_thread(work) for _ in range(6)]:
            result()
        assert counter == [36]
        assert tokens == sorted(set(tokens))

    # -- coroutines --------------------------------------------------------------------

    def test_a_coroutine_acquires_waits_and_releases(self, backend: BaseLockBackend) -> None:
        async def main() -> None:
            def ask(request: LeaseRequest) -> Any:
                return backend.acall("acquire", request, deadline=self.soon(backend))

            lease = await ask(self.request(self.name(), ttl=10 * self.PATIENCE))
            request = self.request(lease.name, waits=True)
            until = clock.now() + self.PATIENCE
            waiting = backend.async_wait(
                *(request, await ask(request)),
                until=until,
                interrupted=lambda: False,
            )
            waiter = asyncio.ensure_future(waiting)
            await asyncio.sleep(0)
            outcome = await backend.acall(
                "release", lease.name, lease.owner, min_hold=0.0, deadline=self.soon(backend)
            )
            assert outcome == "released"
            handed_over = await waiter
            assert clock.now() < until, "nothing woke the waiter"
            assert (handed_over or await ask(request)).token > lease.token

        asyncio.run(main())

    # -- processes ---------------------------------------------------------------------

    def test_g4_a_process_that_has_deregistered_is_dead(self, backend: BaseLockBackend) -> None:
        self.needs(backend, "listing")
        lease = self.grant(backend, self.request(self.name()))
        backend.deregister(current().id, deadline=self.soon(backend))
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
        assert self.granted_to_child(backend, own)
        assert self.renew(backend, lease) == ["renewed"]
        assert self.locked(backend, own.name) == backend.is_shared
        assert self.release(backend, lease) == "released"

    def test_a_closed_backend_may_be_used_again(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        backend.close()
        assert self.release(backend, lease) == "released"
