"""A Redis Cluster: its nodes lead to the one that has the locks, also after a fail-over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from django_dlock import clock
from django_dlock.backends.redis import RedisBackend
from django_dlock.exceptions import BackendRefused, BackendUnavailable, InvalidLockBackend
from django_dlock.lease import Contention, Lease, LeaseRequest
from django_dlock.process import current
from django_dlock.testing import BackendContract
from testproject.servers import ServerNotFound
from tests.conftest import missing
from tests.support.contract_parts import each_command
from tests.support.databases import until
from tests.support.redis_calls import (
    backend_for,
    client,
    grant,
    options_for,
    refuse,
    release,
    renew,
    renewals,
    request,
    wait,
)
from tests.support.redis_cluster import RedisCluster


def started(*args: str) -> Iterator[RedisCluster]:
    try:
        cluster = RedisCluster(args=args).__enter__()
    except ServerNotFound as error:
        missing(str(error))
    yield cluster
    cluster.__exit__()


@pytest.fixture(scope="module")
def _shared_cluster() -> Iterator[RedisCluster]:
    # On a busy machine, a node may stand still for a second. It must not be taken for dead: a
    # fail-over that nobody asked for loses what the replica has not received yet.
    yield from started("--cluster-node-timeout", "30000")


@pytest.fixture
def shared_cluster(_shared_cluster: RedisCluster) -> RedisCluster:
    """A cluster that the tests do not damage; it begins without locks."""
    _shared_cluster.ask(_shared_cluster.owner, "FLUSHALL")
    return _shared_cluster


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """A cluster that the test may damage."""
    yield from started()


def in_cluster(cluster: RedisCluster, **options: object) -> RedisBackend:
    """A backend that begins with a node that does not have the locks."""
    options = {"cluster_nodes": cluster.addresses, **options}
    return backend_for(cluster.stranger.url, command_timeout=5.0, options=options)


def try_until_granted(backend: RedisBackend, attempt: LeaseRequest) -> Lease:
    """Acquire through the outage, as an acquire that may wait does."""
    answers: list[Lease | Contention] = []
    until(lambda: answered(backend, attempt, answers), 60)
    (answer,) = answers
    assert isinstance(answer, Lease)
    return answer


def answered(
    backend: RedisBackend, attempt: LeaseRequest, answers: list[Lease | Contention]
) -> bool:
    try:
        answers.append(backend.acquire(attempt, deadline=backend.call_deadline()))
    except BackendRefused:
        raise
    except BackendUnavailable:
        pass
    return bool(answers)


@each_command
class TestRedisCluster(BackendContract):
    @pytest.fixture
    def backend(self, shared_cluster: RedisCluster) -> RedisBackend:
        return backend_for(shared_cluster.stranger.url)


@pytest.mark.parametrize("number", range(6))
def test_every_node_leads_to_the_one_that_has_the_locks(shared_cluster, number):
    backend = backend_for(shared_cluster.nodes[number].url)
    lease = grant(backend, request())
    assert backend.get("name").owner == lease.owner
    assert [renew(backend, lease), release(backend, lease)] == [["renewed"], "released"]


def test_the_checks_ask_the_node_that_has_the_locks(shared_cluster):
    # A replica has no replicas of its own.
    url = shared_cluster.heir.url
    for replicas in (1, 2):
        (problem,) = backend_for(url, options={"replicas": replicas}).store_problems()
        assert problem.id == "W011"
        assert "which has 1" in problem.message


def test_the_facts_are_those_of_the_node_that_has_the_locks(shared_cluster):
    backend = backend_for(shared_cluster.heir.url)
    facts = {it.topic: it.text for it in backend.facts(deadline=backend.call_deadline())}
    assert facts["server"].endswith(", cluster")
    assert facts["replicas"] == "1 online of 1"


def test_only_the_first_connection_is_led_elsewhere(shared_cluster):
    backend = in_cluster(shared_cluster)
    grant(backend, request("warm"))

    def strays() -> int:
        facts = client(shared_cluster.stranger).info("errorstats")
        return int(facts.get("errorstat_MOVED", {}).get("count", 0))

    before = strays()
    for _ in range(5):
        release(backend, grant(backend, request()))
    assert strays() == before


def test_g1_a_node_that_is_down_is_passed_over(cluster):
    cluster.stranger.kill()
    assert grant(in_cluster(cluster), request()).token


class FailedOver(NamedTuple):
    """A cluster whose node was lost, with ``lease``, which had been confirmed by its replica.

    Attributes:
        connected: A backend that was connected to the lost node. It wants its renewals confirmed,
            and the new primary has no replica.
    """

    cluster: RedisCluster
    connected: RedisBackend
    lease: Lease


@pytest.fixture(scope="module", params=["kill", "pause"])
def failed_over(request: pytest.FixtureRequest) -> Iterator[FailedOver]:
    """One for all tests: a fail-over takes its time."""
    for cluster in started():
        yield from lose_the_owner(cluster, request.param)


def lose_the_owner(cluster: RedisCluster, how: str) -> Iterator[FailedOver]:
    # Each call to a paused node takes the whole of it.
    options = options_for(
        cluster.stranger.url,
        command_timeout=2.0,
        options={"cluster_nodes": cluster.addresses, "replicas": 1},
    )
    connected, lost = RedisBackend(options), cluster.owner
    # Longer than the tests need on a busy machine.
    lease = try_until_granted(connected, request(ttl=600.0))
    getattr(lost, how)()
    try:
        until(lambda: cluster.info(cluster.heir)["role"] == "master")
        yield FailedOver(cluster, connected, lease)
    finally:
        if how == "pause":
            lost.resume()
        connected.close()


def test_g1_a_backend_that_was_connected_to_a_lost_node_finds_the_next(failed_over):
    survivors = in_cluster(failed_over.cluster)
    try_until_granted(survivors, request("another"))
    # Without its replica, so a renewal is not confirmed, but it reaches the new primary.
    until(lambda: told(failed_over.connected, failed_over.lease) == ["unanswered"], 60)
    assert renew(survivors, failed_over.lease) == ["renewed"]


def test_g11_a_lease_survives_the_fail_over_of_its_node(failed_over):
    # A replica of the new primary is missing.
    heirs = in_cluster(failed_over.cluster)
    assert try_until_granted(heirs, request("a third")).token
    lease = failed_over.lease
    assert refuse(heirs, request()).owner == lease.owner
    assert renew(heirs, lease) == ["renewed"]
    assert release(heirs, lease) == "released"
    assert grant(heirs, request()).token > lease.token


def told(backend: RedisBackend, lease: Lease) -> list[str]:
    try:
        return renew(backend, lease)
    except BackendUnavailable:
        return []


def test_g1_a_node_that_is_cut_off_from_its_cluster_is_passed_over(proxy, own_redis):
    options = {"cluster_nodes": [("127.0.0.1", own_redis.port)]}
    backend = backend_for(proxy.url, options=options)
    grant(backend, request("warm"))
    proxy.reply(b"-CLUSTERDOWN The cluster is down\r\n", 10_000)
    assert grant(backend, request()).token


def test_a_waiter_gets_the_lease_of_a_node_that_took_over(cluster):
    holder, waiting = in_cluster(cluster), in_cluster(cluster)
    lease, attempt = grant(holder, request()), request(waits=True, renewed=True)
    refuse(waiting, attempt)
    wait(waiting, attempt, refuse(waiting, attempt), 20)
    cluster.ask(cluster.owner, "WAIT", 1, 20_000)
    cluster.owner.kill()
    try_until_granted(holder, request("another"))
    # As an acquire does: ask, wait, ask again.
    answers: list[Lease | Contention] = []
    until(lambda: answered(waiting, attempt, answers), 60)
    wait(waiting, attempt, answers[0], 0.5)
    met = refuse(waiting, attempt)
    assert release(holder, lease) == "released"
    granted = wait(waiting, attempt, met, 20) or grant(waiting, attempt)
    assert granted.token > lease.token


def test_g1_a_lease_survives_the_move_of_its_keys_to_another_node(cluster):
    source, target = cluster.owner, cluster.stranger
    backend = in_cluster(cluster)
    lease, attempt = grant(backend, request()), request(waits=True, renewed=True)
    refuse(backend, attempt)
    wait(backend, attempt, refuse(backend, attempt), 20)
    refuse(backend, attempt)
    slot = cluster.slot
    cluster.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
    cluster.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
    keys = cluster.ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100)

    def move(some):
        cluster.ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *some)

    # Half of the keys are here and half there: no script can run.
    move(keys[::2])
    told: list[object] = []

    def keep() -> None:
        told.append(renew(backend, lease))

    with pytest.raises(BackendUnavailable) as unavailable:
        backend.acquire(request(), deadline=clock.now() + 0.5)
    assert type(unavailable.value) is BackendUnavailable
    thread = threading.Thread(target=keep)
    thread.start()
    move(keys[1::2])
    for node in (target, source):
        cluster.ask(node, "CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(target))
    thread.join(60)
    assert told == [["renewed"]]
    assert backend.get("name").owner == lease.owner
    assert [it.name for it in backend.list()] == ["name"]
    met = refuse(backend, attempt)
    wait(backend, attempt, met, 0.5)
    met = refuse(backend, attempt)
    assert release(backend, lease) == "released"
    granted = wait(backend, attempt, met, 20) or grant(backend, attempt)
    assert granted.token > lease.token


def test_a_cluster_without_a_majority_is_unavailable(cluster):
    backend = in_cluster(cluster)
    lease = grant(backend, request())
    for node in cluster.nodes:
        if node is not cluster.owner:
            node.kill()

    def is_down() -> bool:
        return b"cluster_state:fail" in cluster.raw(cluster.owner, "CLUSTER INFO")

    until(is_down)
    with pytest.raises(BackendUnavailable) as unavailable:
        backend.acquire(request("another"), deadline=clock.now() + 1.0)
    assert type(unavailable.value) is BackendUnavailable
    # So a holder that is cut off with its node does not go on for long.
    with pytest.raises(BackendUnavailable):
        backend.renew(renewals(lease), process=current().id, deadline=clock.now() + 0.5)


@pytest.mark.parametrize("nodes", ["redis-2:6379", [("redis-2", "port")], ["redis-2"], [1], 1])
def test_wrong_cluster_nodes_are_an_error(nodes):
    with pytest.raises(InvalidLockBackend, match=r"cluster_nodes.*pairs"):
        backend_for("redis://127.0.0.1:1/0", options={"cluster_nodes": nodes})


def test_cluster_nodes_and_sentinels_exclude_each_other():
    options = {"cluster_nodes": [("h", 1)], "sentinels": [("h", 2)]}
    with pytest.raises(
        InvalidLockBackend, match="has both 'cluster_nodes' and 'sentinels'; it takes one"
    ):
        backend_for("redis://mymaster/0", options=options)


def test_a_database_number_that_a_cluster_does_not_have_is_refused(shared_cluster):
    with pytest.raises(BackendRefused, match="cluster mode"):
        grant(backend_for(shared_cluster.owner.url.removesuffix("0") + "3"), request())
