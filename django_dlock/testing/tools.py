"""The words in which the contract's tests are written."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from .. import clock
from ..backends.base import BaseLockBackend
from ..lease import Contention, Lease, LeaseRequest, Renewal
from ..process import current

__all__ = ["ContractTools"]

T = TypeVar("T")


class ContractTools:
    """What the tests of the contract say in one word."""

    SHORT: ClassVar[float] = 0.3
    """Seconds: a TTL short enough for a test to outlive it."""
    PATIENCE: ClassVar[float] = 20.0
    """Seconds after which something that must happen is said not to happen."""

    @staticmethod
    def name() -> str:
        return f"contract:{secrets.token_hex(8)}"

    @staticmethod
    def request(name: str, *, ttl: float = 30.0, **kwargs: Any) -> LeaseRequest:
        return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=ttl, **kwargs)

    @staticmethod
    def soon(backend: BaseLockBackend) -> float:
        return clock.now() + 10 * backend.command_timeout

    def grant(self, backend: BaseLockBackend, request: LeaseRequest) -> Lease:
        """Acquire what must be free."""
        answer = backend.acquire(request, deadline=self.soon(backend))
        assert isinstance(answer, Lease), answer
        return answer

    def refuse(self, backend: BaseLockBackend, request: LeaseRequest) -> Contention:
        """Try to acquire what must not be given."""
        answer = backend.acquire(request, deadline=self.soon(backend))
        assert isinstance(answer, Contention), answer
        return answer

    def release(self, backend: BaseLockBackend, lease: Lease, min_hold: float = 0.0) -> str:
        return backend.release(
            lease.name, lease.owner, min_hold=min_hold, deadline=self.soon(backend)
        )

    def renew(self, backend: BaseLockBackend, *leases: Lease, ttl: float = 30.0) -> list[str]:
        renewals = [Renewal(lease.name, lease.owner, ttl) for lease in leases]
        return list(backend.renew(renewals, process=current().id, deadline=self.soon(backend)))

    def locked(self, backend: BaseLockBackend, name: str) -> bool:
        return backend.locked(name, deadline=self.soon(backend))

    def wait(
        self, backend: BaseLockBackend, request: LeaseRequest, met: Contention
    ) -> Lease | None:
        """Wait for what must come before the waiter's patience ends."""
        until = clock.now() + self.PATIENCE
        handed_over = backend.wait(
            request,
            met,
            until=until,
            deadline=until + backend.command_timeout,
            interrupted=lambda: False,
        )
        assert clock.now() < until, "nothing woke the waiter"
        return handed_over

    def acquire_waiting(self, backend: BaseLockBackend, request: LeaseRequest) -> Lease:
        """Acquire as a patient caller does."""
        give_up_at = clock.now() + self.PATIENCE
        while clock.now() < give_up_at:
            answer = backend.acquire(request, deadline=self.soon(backend))
            if isinstance(answer, Contention):
                handed_over = self.wait(backend, request, answer)
                if handed_over is None:
                    continue
                answer = handed_over
            return answer
        raise AssertionError(f"{request.name} was not granted within {self.PATIENCE} s")

    def outlive(self, backend: BaseLockBackend, name: str) -> None:
        """Let the lease of the name end by its TTL."""
        probe = self.request(name)
        while self.locked(backend, name):
            met = backend.acquire(probe, deadline=self.soon(backend))
            if isinstance(met, Lease):
                raise AssertionError("the name was locked and yet granted")
            self.wait(backend, probe, met)

    @staticmethod
    def in_thread(call: Callable[[], T]) -> Callable[[], T]:
        """Run the call on a thread; the function returned waits for its result."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - raised in the test
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def result() -> T:
            thread.join(ContractTools.PATIENCE + 10)
            assert not thread.is_alive(), "still waiting"
            if errors:
                raise errors[0]
            return results[0]

        return result

    @staticmethod
    def needs_listing(backend: BaseLockBackend) -> None:
        if not backend.supports_listing:
            import pytest

            pytest.skip("the backend does not list")
