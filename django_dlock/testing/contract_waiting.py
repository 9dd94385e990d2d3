"""The rules for those who wait, threads and coroutines."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from .. import clock
from ..backends.base import BaseLockBackend
from ..lease import LeaseRequest
from .tools import ContractTools

__all__ = ["WaitingContract"]


class WaitingContract(ContractTools):
    """The part of ``BackendContract`` that depends on how a caller waits.

    A coroutine reaches a store by ``acall``, which makes the same calls as a thread, and by
    ``async_wait``, which a store may write for itself. So these tests alone can have another
    outcome for coroutines than for threads.
    """

    def test_a_waiter_is_woken_by_the_release(self, backend: BaseLockBackend) -> None:
        """On every store: each store wakes its waiters in a way of its own."""
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
        """On every store: a break is a command of its own, which may forget to wake."""
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        request = self.request(lease.name, waits=True)
        met = self.refuse(backend, request)
        waiter = self.in_thread(lambda: self.wait(backend, request, met))
        assert backend.break_silently(lease.name, owner=lease.owner)
        if waiter() is None:
            self.grant(backend, request)

    def test_a_cancelled_waiter_passes_the_wake_up_on(self, backend: BaseLockBackend) -> None:
        """On every store: a store that wakes one waiter must then wake the next."""
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
        """On every store: each backend has a wait of its own, which must ask whether to go on."""
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        request = self.request(lease.name, waits=True)
        until, asked = clock.now() + self.PATIENCE, threading.Event()

        def interrupted() -> bool:
            asked.set()
            return True

        # A wait may end for another reason, such as the pause of a store that wakes nobody.
        for _ in range(3):
            met = self.refuse(backend, request)
            assert backend.wait(request, met, until=until, interrupted=interrupted) is None
            assert clock.now() < until
            if asked.is_set():
                break

    def test_a_waiter_is_told_of_a_renewal_that_shortens_the_lease(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: a waiter that sleeps until the end that it knows must be woken."""
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        request = self.request(lease.name, waits=True)
        met = self.refuse(backend, request)
        # Some stores wake their waiters once when the process begins to listen.
        soon = clock.now() + self.SHORT
        backend.wait(request, met, until=soon, interrupted=lambda: False)
        met = self.refuse(backend, request)
        # Less than the time after which a waiter asks again anyway.
        until = clock.now() + self.PATIENCE / 4
        waiter = self.in_thread(
            lambda: backend.wait(request, met, until=until, interrupted=lambda: False)
        )
        assert self.prolong(backend, lease, self.SHORT, number=1).outcome == "renewed"
        if waiter() is None:
            assert clock.now() < until, "nothing woke the waiter"
            self.acquire_waiting(backend, request)

    def test_a_waiter_sleeps_no_longer_than_the_lease_in_its_way(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: many stores send nothing when a lease expires, so the wait must end."""
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        self.acquire_waiting(backend, self.request(lease.name, waits=True))

    def test_g1_the_count_under_the_lock_is_exact(self, backend: BaseLockBackend) -> None:
        """On every store: grants, releases and wake-ups must work together under contention."""
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
        """On every store: a store may have a wait for coroutines of its own."""

        async def main() -> None:
            def ask(request: LeaseRequest) -> Any:
                return backend.acall(backend.acquire, request, deadline=self.soon(backend))

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
                backend.release,
                lease.name,
                lease.owner,
                min_hold=0.0,
                deadline=self.soon(backend),
            )
            assert outcome == "released"
            handed_over = await waiter
            assert clock.now() < until, "nothing woke the waiter"
            assert (handed_over or await ask(request)).token > lease.token

        asyncio.run(main())
