"""Redlock keeps the contract, on 3 and on 5 nodes, for threads and for coroutines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.redlock import RedlockBackend
from django_dlock.testing import BackendContract
from tests.support.nodes import AwaitedRedlockBackend, Nodes


@pytest.fixture(params=[3, 5], scope="module")
def servers(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with Nodes(request.param) as servers:
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


class TestAwaitedRedlock(BackendContract):
    SHORT = 1.5

    @pytest.fixture
    def backend(self, nodes: Nodes) -> Iterator[AwaitedRedlockBackend]:
        urls = [node.server.url for node in nodes.all]
        backend = AwaitedRedlockBackend(nodes.options(urls))
        yield backend
        backend.close()
