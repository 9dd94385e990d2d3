"""Helper methods for the tests of the contract."""

from __future__ import annotations

import os
import secrets
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from .. import clock
from ..backends.base import BaseLockBackend, Capability
from ..lease import Contention, Lease, LeaseRequest, Outcome, ReleaseRequest, Renewal, RenewalResult
from ..process import current

__all__ = ["ContractTools"]

T = TypeVar("T")


class ContractTools:
    """Helper methods for the tests of the contract."""

    SHORT: ClassVar[float] = 0.3
    """A TTL in seconds that is short enough for a test to wait for its end."""
    SPREAD: ClassVar[float] = 0.0
    """Seconds by which the servers of a store may differ about when a request came."""
    PATIENCE: ClassVar[float] = 20.0
    """Seconds after which a test fails if something has not happened."""

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
        """Acquire a name that must be free."""
        answer = backend.acquire(request, deadline=self.soon(backend))
        assert isinstance(answer, Lease), answer
        return answer

    def refuse(self, backend: BaseLockBackend, request: LeaseRequest) -> Contention:
        """Try to acquire a name that must be held."""
        answer = backend.acquire(request, deadline=self.soon(backend))
        assert isinstance(answer, Contention), answer
        return answer

    def granted_to_child(self, backend: BaseLockBackend, request: LeaseRequest) -> bool:
        """Whether a forked child, which ends at once, is granted the request."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            # The child must not run any code of the test runner, so it ends with ``_exit``.
            try:
                try:
                    backend.after_fork()
                    answer = type(backend.acquire(request, deadline=self.soon(backend))).__name__
                except BaseException:  # noqa: BLE001 - the test shows it
                    answer = traceback.format_exc()
                os.write(writing, answer.encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        assert answer in {"Lease", "Contention"}, answer
        return answer == "Lease"

    def release(self, backend: BaseLockBackend, lease: Lease, min_hold: float = 0.0) -> str:
        return backend.release(
            lease.name, lease.owner, min_hold=min_hold, deadline=self.soon(backend)
        )

    def release_many(
        self, backend: BaseLockBackend, releases: Sequence[ReleaseRequest]
    ) -> list[Outcome]:
        return backend.release_many(releases, deadline=self.soon(backend))

    def renew(self, backend: BaseLockBackend, *leases: Lease, ttl: float = 30.0) -> list[str]:
        renewals = [Renewal(lease.name, lease.owner, ttl) for lease in leases]
        results = backend.renew(renewals, process=current().id, deadline=self.soon(backend))
        return [result.outcome for result in results]

    def prolong(
        self, backend: BaseLockBackend, lease: Lease, ttl: float, *, number: int = 0
    ) -> RenewalResult:
        """Renew one lease; with a number, the renewal may shorten it."""
        renewal = Renewal(lease.name, lease.owner, ttl, number)
        (result,) = backend.renew([renewal], process=current().id, deadline=self.soon(backend))
        return result

    def grant_and_renew(self, backend: BaseLockBackend, ttl: float) -> tuple[Lease, float]:
        """A short lease that was renewed before its end, and its deadline after that.

        On a machine that stalls, a lease may end first; then there is another attempt, instead of
        a first TTL so long that each test would wait for it.
        """
        give_up_at = clock.now() + self.PATIENCE
        while True:
            lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
            asked_at = clock.now()
            result = self.prolong(backend, lease, ttl)
            if result.outcome == "renewed":
                return lease, asked_at + result.ttl * (1 - clock.DRIFT)
            assert lease.deadline < clock.now() < give_up_at, result.outcome

    def remaining(self, backend: BaseLockBackend, name: str) -> float:
        """Seconds until the lease of a held name ends."""
        return self.refuse(backend, self.request(name)).remaining

    @staticmethod
    def outcome(backend: BaseLockBackend, outcome: Outcome) -> Outcome:
        """The answer that the backend must give about a lease that ended with this outcome."""
        return outcome if "memory_of_ends" in backend.capabilities else "unknown"

    def locked(self, backend: BaseLockBackend, name: str) -> bool:
        return backend.locked(name, deadline=self.soon(backend))

    def wait(
        self, backend: BaseLockBackend, request: LeaseRequest, met: Contention
    ) -> Lease | None:
        """Wait; fails if nothing wakes the waiter."""
        until = clock.now() + self.PATIENCE
        handed_over = backend.wait(request, met, until=until, interrupted=lambda: False)
        assert clock.now() < until, "nothing woke the waiter"
        return handed_over

    def acquire_waiting(self, backend: BaseLockBackend, request: LeaseRequest) -> Lease:
        """Acquire; waits as often as necessary."""
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
        """Wait until the lease on the name has ended with its TTL."""
        give_up_at = clock.now() + self.PATIENCE
        while self.locked(backend, name):
            assert clock.now() < give_up_at, "the lease does not end"
            threading.Event().wait(0.01)

    @staticmethod
    def in_thread(call: Callable[[], T]) -> Callable[[], T]:
        """Run the call on a thread; returns a function that waits for its result."""
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
    def needs(backend: BaseLockBackend, *capabilities: Capability) -> None:
        """Skip the test if the backend does not declare these capabilities."""
        missing = set(capabilities) - backend.capabilities
        if missing:
            import pytest

            pytest.skip(f"the backend does not have {', '.join(sorted(missing))}")
