"""The rules for processes that end or fork."""

from __future__ import annotations

from ..backends.base import BaseLockBackend
from ..process import current
from .tools import ContractTools

__all__ = ["ProcessContract"]


class ProcessContract(ContractTools):
    """A part of ``BackendContract``."""

    def test_g4_a_process_that_has_deregistered_is_dead(self, backend: BaseLockBackend) -> None:
        """On every store: a goodbye is a command of its own, which must reach the lists."""
        self.needs(backend, "listing")
        if backend.heartbeat is None:
            import pytest

            pytest.skip("the store's own sessions show who is alive")
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
        """On every store: a fork copies the client's connections, and the child needs its own."""
        lease = self.grant(backend, self.request(self.name()))
        own = self.request(self.name())
        assert self.granted_to_child(backend, own)
        assert self.renew(backend, lease) == ["renewed"]
        assert self.locked(backend, own.name) == backend.is_shared
        assert self.release(backend, lease) == "released"

    def test_a_closed_backend_may_be_used_again(self, backend: BaseLockBackend) -> None:
        """On every store: the backend connects again in a way of its own."""
        lease = self.grant(backend, self.request(self.name()))
        backend.close()
        assert self.release(backend, lease) == "released"
