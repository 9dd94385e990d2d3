"""Redlock keeps the contract on three nodes.

How many nodes are a majority is tested where it is reckoned, in ``unit/test_redlock_votes.py``, and
on five servers in ``test_redlock_faults.py``. Coroutines wait as the base class lets them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.base import BaseLockBackend
from django_dlock.backends.redlock import RedlockBackend
from django_dlock.exceptions import QuorumNotReached
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.testing import BackendContract
from tests.support.declared_keys import all_keys_declared
from tests.support.nodes import Nodes


@pytest.fixture(scope="module")
def servers() -> Iterator[Nodes]:
    with Nodes(3) as servers, all_keys_declared(servers.all[0].server):
        yield servers


@pytest.fixture
def nodes(servers: Nodes) -> Iterator[Nodes]:
    servers.begin_anew()
    yield servers
    servers.close()


class TestRedlock(BackendContract):
    # Two round trips to several servers take no longer, as a rule.
    SHORT = 0.8
    # Whichever nodes answer first tell it, and a request reaches them one after another.
    SPREAD = 0.5

    def grant(self, backend: BaseLockBackend, request: LeaseRequest, attempts: int = 5) -> Lease:
        try:
            return super().grant(backend, request)
        except QuorumNotReached as error:
            # On a machine that stalls; such a grant is withdrawn, and the next may be in time.
            if "longer than the lease" not in str(error) or attempts == 1:
                raise
            return self.grant(backend, request, attempts - 1)

    @pytest.fixture
    def backend(self, nodes: Nodes) -> RedlockBackend:
        return nodes.backend(urls=[node.server.url for node in nodes.all])
