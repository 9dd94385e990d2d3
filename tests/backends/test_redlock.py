"""Redlock keeps the contract on three nodes.

How many nodes are a majority is tested where it is reckoned, in ``unit/test_redlock_votes.py``, and
on five servers in ``test_redlock_faults.py``. Coroutines wait as the base class lets them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.redlock import RedlockBackend
from django_dlock.testing import BackendContract
from tests.support.nodes import Nodes


@pytest.fixture(scope="module")
def servers() -> Iterator[Nodes]:
    with Nodes(3) as servers:
        yield servers


@pytest.fixture
def nodes(servers: Nodes) -> Iterator[Nodes]:
    servers.begin_anew()
    yield servers
    servers.close()


class TestRedlock(BackendContract):
    # A grant that takes longer is withdrawn, and it takes two round trips to several servers.
    SHORT = 1.5

    @pytest.fixture
    def backend(self, nodes: Nodes) -> RedlockBackend:
        return nodes.backend(urls=[node.server.url for node in nodes.all])
