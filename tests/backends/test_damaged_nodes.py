"""A value of another type on the nodes of Redlock stops nobody, and one row is marked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from django_dlock.backends.redis.keys import Keys
from django_dlock.lease import LeaseQuery
from tests.support.nodes import Nodes
from tests.support.redis_calls import client, grant, refuse, release, renew, request


@pytest.fixture(scope="module")
def servers() -> Iterator[Nodes]:
    with Nodes(3) as servers:
        yield servers


@pytest.fixture
def nodes(servers: Nodes) -> Iterator[Nodes]:
    servers.begin_anew()
    yield servers
    servers.close()


def write(nodes: Nodes, key: str, *, to: int) -> None:
    """Put a list in the place of a key, on so many nodes."""
    base = Keys(nodes.prefix).base
    for node in nodes.all[:to]:
        with client(node.server) as stranger:
            stranger.delete(base + key)
            stranger.rpush(base + key, "x")
            stranger.zadd(f"{base}i", {"name": 1}) if key == "l:name" else None


@pytest.mark.parametrize("key", ["q:name", "clock"])
def test_a_key_of_another_type_stops_nobody(nodes, key):
    backend = nodes.backend(urls=[node.server.url for node in nodes.all])
    lease = grant(backend, request())
    write(nodes, key, to=3)
    assert renew(backend, lease) == ["renewed"]
    assert refuse(backend, request()).owner == lease.owner
    assert release(backend, lease) == "released"
    later = grant(backend, request())
    assert later.token > lease.token


@pytest.mark.parametrize("of", [1, 3])
def test_a_lock_of_another_type_is_marked_and_hides_no_other(nodes, of):
    backend = nodes.backend(urls=[node.server.url for node in nodes.all])
    for name in ("a", "b"):
        grant(backend, request(name))
    write(nodes, "l:name", to=of)
    found = {info.name: info.damaged for info in backend.page(LeaseQuery()).infos}
    sound = {"a": (), "b": ()}
    # A single node is no quorum.
    assert found == (sound if of == 1 else {**sound, "name": ("type",)})


def test_a_node_whose_own_mark_was_overwritten_comes_back(nodes):
    backend = nodes.backend(urls=[node.server.url for node in nodes.all])
    lease = grant(backend, request())
    write(nodes, "node", to=1)
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"
    assert release(backend, grant(backend, request())) == "released"
    with client(nodes.all[0].server) as stranger:
        # Kept out for a while, as one that has lost its data.
        assert stranger.type(f"{Keys(nodes.prefix).base}node") == "string"
