"""Nodes of a quorum that are cut off, stopped, killed or slow, and replies that are lost."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import threading
import time
import traceback
from contextlib import ExitStack

import pytest

from django_dlock import LeaseLost, Lock, clock, locks
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.redis.keys import Keys
from django_dlock.backends.redlock import RedlockBackend
from django_dlock.backends.redlock import backend as redlock
from django_dlock.exceptions import BackendRefused, BackendUnavailable, QuorumNotReached
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from django_dlock.process import current
from testproject.servers import RedisServer
from tests.support.aliases import configured
from tests.support.nodes import Nodes
from tests.support.proxy import SCRIPTS

PATIENCE = 30.0
"""Seconds after which a test fails if something has not happened."""

SLOW = 15.0
"""A command timeout; many calls together take less, unless one of them waits for a dead node."""

SUBSETS = [set(some) for size in range(4) for some in itertools.combinations(range(3), size)]


def outages(*others):
    """Each subset of the nodes refuses; in other ways, one subset of each size fails.

    The majority is decided by the number of answers, whichever nodes they come from. In what way a
    node fails decides only how its answer is missed.
    """
    sizes = [{1}, {0, 2}, {0, 1, 2}]
    all_ = [(down, "refuse") for down in SUBSETS]
    return all_ + [(down, how) for how in others for down in sizes]


@pytest.fixture(scope="module")
def three():
    with Nodes(3) as servers:
        yield servers


@pytest.fixture(scope="module")
def five():
    with Nodes(5) as servers:
        yield servers


@pytest.fixture
def nodes(three):
    three.begin_anew()
    yield three
    three.close()
    three.heal()


def request(name="name", ttl=60.0, **kwargs):
    return LeaseRequest(name, secrets.token_hex(16), ttl, **kwargs)


def acquire(backend, asked=None, *, deadline=None):
    return backend.acquire(asked or request(), deadline=deadline or backend.call_deadline())


def grant(backend, asked=None):
    lease = acquire(backend, asked)
    assert isinstance(lease, Lease), lease
    return lease


def release(backend, lease):
    deadline = backend.call_deadline()
    return backend.release(lease.name, lease.owner, min_hold=0.0, deadline=deadline)


def locked(backend, name="name"):
    return backend.locked(name, deadline=backend.call_deadline())


def warm(backend):
    """Connect to all nodes, and wait for their answers.

    An earlier test may have left a fault behind: a node that has not answered since may break the
    connection once more, and then it is not asked again.
    """

    def is_connected():
        retried(lambda: locked(backend, "warm"))
        return all(node.link is not None and not node.is_busy for node in backend._nodes)

    eventually(is_connected)


def renew(backend, *leases, ttl=60.0):
    renewals = [Renewal(lease.name, lease.owner, ttl) for lease in leases]
    deadline = backend.call_deadline()
    return [it.outcome for it in backend.renew(renewals, process=current().id, deadline=deadline)]


def eventually(condition, patience=PATIENCE):
    give_up_at = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < give_up_at, "it does not happen"
        time.sleep(0.01)


def retried(call):
    """The result of ``call`` once a quorum is reached: it takes a moment to find a node again."""
    give_up_at = time.monotonic() + PATIENCE
    while time.monotonic() < give_up_at:
        with contextlib.suppress(QuorumNotReached):
            return call()
        time.sleep(0.02)
    raise AssertionError("no quorum is reached")


def single(nodes, number):
    """The Redis backend on one of the nodes: it does what a rival's command does there."""
    node = nodes[number]
    options = nodes.options(options={})
    return RedisBackend(dataclasses.replace(options, location=node.server.url))


def held_by_a_rival(nodes, *numbers, name="name", ttl=60.0):
    rival = request(name, ttl)
    for number in numbers:
        backend = single(nodes, number)
        grant(backend, rival)
        backend.close()
    return rival


def dlocks(nodes, **entry):
    options = {"command_timeout": 2.0, **entry.pop("OPTIONS", {})}
    return {
        "default": {
            "BACKEND": "django_dlock.backends.redlock.RedlockBackend",
            "LOCATION": nodes.urls,
            "KEY_PREFIX": nodes.prefix,
            "TTL": 6.0,
            "WAIT": PATIENCE,
            "OPTIONS": {"outage_patience": PATIENCE, **options},
            **entry,
        }
    }


# -- every subset of the nodes -------------------------------------------------------------


@pytest.mark.parametrize(("down", "how"), outages("black hole", "pause", "kill"), ids=str)
def test_g1_a_lease_is_granted_and_guarded_by_a_majority_only(nodes, down, how):
    backend = nodes.backend(command_timeout=20.0 if len(down) < 2 else 0.5)
    nodes.fail(down, how)
    if len(down) < 2:
        lease = grant(backend)
        assert isinstance(acquire(backend), Contention)
        assert renew(backend, lease) == ["renewed"]
        assert locked(backend)
        assert backend.get("name").owner == lease.owner
        assert [info.owner for info in backend.list()] == [lease.owner]
        assert release(backend, lease) == "released"
        assert not locked(backend)
        return
    with pytest.raises(QuorumNotReached, match="of 3 nodes gave no vote") as caught:
        acquire(backend)
    assert nodes[min(down)].proxy.url.split("/")[2] in str(caught.value)
    if how != "kill":
        # What a node granted, or grants when it wakes up, is withdrawn.
        nodes.heal()
        eventually(lambda: nodes.owners_of("name") == [""] * 3)


@pytest.mark.parametrize(("down", "how"), outages("pause")[1:], ids=str)
def test_g5_a_lease_outlives_an_outage_shorter_than_itself(nodes, down, how):
    backend = nodes.backend(command_timeout=20.0 if len(down) < 2 else 0.5)
    warm(backend)
    lease = retried(lambda: grant(backend))
    eventually(lambda: nodes.owners_of("name") == [lease.owner] * 3)
    nodes.fail(down, how)
    if len(down) < 2:
        assert renew(backend, lease) == ["renewed"]
    else:
        for call in (renew, release):
            with pytest.raises(QuorumNotReached):
                call(backend, lease)
        with pytest.raises(QuorumNotReached):
            acquire(backend)
    nodes.heal()
    # The release also reaches the nodes that were down when it was called.
    if len(down) < 2:
        assert release(backend, lease) == "released"
    eventually(lambda: nodes.owners_of("name") == [""] * 3)
    assert retried(lambda: release(backend, lease)) == "released"


def test_g1_with_five_nodes_each_subset_is_decided_by_three(five):
    for size in range(6):
        for down in itertools.combinations(range(5), size):
            five.begin_anew()
            backend = five.backend()
            five.fail(down)
            if size > 2:
                with pytest.raises(QuorumNotReached, match=f"{size} of 5 nodes"):
                    acquire(backend)
                continue
            lease = grant(backend)
            assert isinstance(acquire(backend), Contention)
            assert renew(backend, lease) == ["renewed"]
            assert release(backend, lease) == "released"


def test_nodes_that_were_never_reachable_are_named_without_their_password(nodes):
    urls = [url.replace("redis://", "redis://:secret@") for url in nodes.urls]
    nodes.fail([0, 1, 2])
    backend = nodes.backend(urls, command_timeout=0.5)
    with pytest.raises(BackendUnavailable, match="3 of 3 nodes") as caught:
        acquire(backend)
    assert "secret" not in str(caught.value)
    assert all(f"127.0.0.1:{node.proxy.port}: " in str(caught.value) for node in nodes.all)


def test_nodes_that_refuse_the_settings_are_not_asked_again_and_again(nodes):
    urls = [url.replace("redis://", "redis://:wrong@") for url in nodes.urls]
    with pytest.raises(BackendRefused, match="3 of 3 nodes"):
        acquire(nodes.backend(urls))
    with pytest.raises(BackendRefused):
        acquire(nodes.backend([nodes.urls[0], *urls[1:]]))
    assert grant(nodes.backend([*nodes.urls[:2], urls[2]]))


# -- lost replies --------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_g5_replies_that_are_cut_off_are_asked_for_again(nodes, lost):
    backend = nodes.backend()
    warm(backend)
    for node in nodes.all[:lost]:
        node.proxy.drop_replies(how="close")
    lease = grant(backend)
    eventually(lambda: nodes.owners_of("name") == [lease.owner] * 3)
    for node in nodes.all[:lost]:
        node.proxy.drop_replies(how="close")
    assert release(backend, lease) == "released"
    assert release(backend, lease) == "released"
    for node in nodes.all[:lost]:
        node.proxy.drop_replies(how="close")
    later = grant(backend)
    assert later.token > lease.token


def test_g5_an_acquire_is_repeated_after_a_majority_of_its_replies_was_lost(nodes):
    # The first acquire lasts for the whole of it, and the other calls are repeated.
    backend = nodes.backend(command_timeout=0.5)
    warm(backend)
    for node in nodes.all[:2]:
        node.proxy.drop_replies(how="swallow")
    asked = request()
    with pytest.raises(QuorumNotReached):
        acquire(backend, asked)
    # It was granted there, and that was withdrawn without a trace.
    lease = retried(lambda: grant(backend, asked))
    assert lease.owner == asked.owner
    assert isinstance(retried(lambda: acquire(backend)), Contention)


def test_g7_a_cancelled_acquire_is_never_granted(nodes):
    backend = nodes.backend()
    nodes.fail([2])
    asked = request()
    backend.cancel_acquire(asked, deadline=backend.call_deadline())
    nodes.heal()
    assert isinstance(acquire(backend, asked), Contention)
    eventually(lambda: nodes.owners_of("name") == [""] * 3)
    eventually(lambda: isinstance(acquire(backend), Lease))


def test_g7_an_interrupted_acquire_is_cancelled(nodes, monkeypatch):
    backend = nodes.backend()
    warm(backend)
    passed = [node.proxy.count(*SCRIPTS) for node in nodes.all]
    monkeypatch.setattr(redlock.Broadcast, "wait", lambda *_: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        acquire(backend)
    monkeypatch.undo()
    # The acquire, and what withdraws it.
    for node, before in zip(nodes.all, passed, strict=True):
        node.proxy.wait_until(lambda proxy, before=before: proxy.count(*SCRIPTS) >= before + 2)
    eventually(lambda: nodes.owners_of("name") == [""] * 3)


# -- what is granted without a quorum is withdrawn -----------------------------------------


def test_g5_a_grant_without_a_quorum_is_withdrawn_at_once(nodes):
    rival = held_by_a_rival(nodes, 0, 1)
    backend = nodes.backend()
    met = acquire(backend)
    assert isinstance(met, Contention)
    assert met.owner == rival.owner
    assert 50 < met.remaining < 60
    eventually(lambda: nodes.owners_of("name") == [rival.owner, rival.owner, ""])


def test_nobody_waits_for_a_paused_node_to_know_the_holders_process(nodes):
    held_by_a_rival(nodes, 0, 1)
    for number in (0, 1):
        lock = Keys(nodes.prefix).locks + "name"
        nodes[number].client.hset(lock, "proc", "forgotten")
    backend = nodes.backend()
    warm(backend)
    nodes[2].fail("pause")
    met = []
    asking = threading.Thread(target=lambda: met.append(acquire(backend)))
    asking.start()
    asking.join(backend.command_timeout / 2)
    assert isinstance(met[0], Contention)
    assert met[0].process is None


def test_g5_a_late_grant_without_a_quorum_is_withdrawn(nodes):
    held_by_a_rival(nodes, 0, 1)
    backend = nodes.backend()
    warm(backend)
    passed = nodes[2].proxy.count(*SCRIPTS)
    nodes[2].fail("pause")
    asked = request()
    # Decided by two, while the third has not answered.
    assert isinstance(acquire(backend, asked), Contention)
    nodes[2].heal()
    nodes[2].proxy.wait_until(lambda proxy: proxy.count(*SCRIPTS) >= passed + 2)
    eventually(lambda: nodes[2].owner_of(nodes.prefix, "name") == "")
    # The same owner may ask again.
    for number in (0, 1):
        nodes[number].client.flushdb()
        nodes[number].join(nodes.prefix)
    assert grant(backend, asked).owner == asked.owner


def evals_of(node) -> int:
    """How many scripts that came with their source a node has run."""
    calls: int = node.client.info("commandstats").get("cmdstat_eval", {}).get("calls", 0)
    return calls


def token_of(nodes, number) -> bytes | None:
    """The token in the lease of "name" on one node."""
    token: bytes | None = nodes[number].client.hget(Keys(nodes.prefix).locks + "name", "token")
    return token


def test_g1_a_late_withdrawal_of_an_earlier_try_ends_no_grant(nodes):
    # try 1 finds no quorum ──► its withdrawal is late ──► try 2 is granted ──► the withdrawal
    backend = nodes.backend(command_timeout=1.0)
    warm(backend)
    # From now on an acquire is sent by its digest, and only the first withdrawal with its source.
    release(backend, grant(backend, request("warm")))
    nodes.fail([1, 2])
    late, asked = nodes[0].proxy, request()
    late.keep(of=("EVAL",))
    with pytest.raises(QuorumNotReached):
        acquire(backend, asked)
    late.wait_until(lambda proxy: proxy.kept == 1)
    nodes[1].heal()
    lease = retried(lambda: grant(backend, asked))
    assert nodes.owners_of("name")[:2] == [lease.owner] * 2
    evals, token = evals_of(nodes[0]), token_of(nodes, 0)
    late.deliver()
    # Otherwise the question could overtake the withdrawal.
    eventually(lambda: evals_of(nodes[0]) > evals)
    assert nodes.owners_of("name")[:2] == [lease.owner] * 2
    # A copy of try 2 may follow on the same connection, and would be a new grant.
    assert token_of(nodes, 0) == token
    nodes[2].heal()
    assert isinstance(retried(lambda: acquire(nodes.backend())), Contention)


def test_other_owners_that_split_the_nodes_are_contention_and_no_outage(nodes):
    rival = held_by_a_rival(nodes, 0)
    nodes.fail([1])
    backend = nodes.backend()
    met = acquire(backend)
    assert isinstance(met, Contention)
    assert met.owner == rival.owner
    eventually(lambda: nodes[2].owner_of(nodes.prefix, "name") == "")


def test_g1_a_grant_that_took_longer_than_its_lease_does_not_count(nodes):
    backend = nodes.backend()
    warm(backend)
    for node in nodes.all[:2]:
        node.slow_down(0.4)
    with pytest.raises(QuorumNotReached, match="longer than the lease"):
        acquire(backend, request(ttl=0.3))


def test_g9_the_possible_clock_drift_is_subtracted(nodes):
    options = {"max_ttl": 100.0, "clock_drift": 0.2}
    backend = nodes.backend(options=options)
    lease = grant(backend, request(ttl=50.0))
    assert 39.0 < lease.ttl <= 40.0
    (renewed,) = backend.renew(
        [Renewal(lease.name, lease.owner, 100.0)],
        process=current().id,
        deadline=backend.call_deadline(),
    )
    assert 79.0 < renewed.ttl <= 80.0


def test_no_lease_is_longer_than_a_restarted_node_is_kept_out(nodes):
    backend = nodes.backend(options={"max_ttl": 40.0})
    lease = grant(backend, request(ttl=500.0))
    assert lease.ttl <= 40
    # The last of them may answer when the others have decided.
    eventually(lambda: nodes.owners_of("name") == [lease.owner] * 3)
    assert renew(backend, lease, ttl=500.0) == ["renewed"]
    assert max(node.client.hget(f"{{{nodes.prefix}:0}}:2:l:name", "ttl") for node in nodes.all) <= (
        b"40001"
    )
    with configured(dlocks(nodes, OPTIONS={"max_ttl": 40.0})):
        with pytest.raises(ValueError, match="max_ttl"):
            Lock("name", ttl=41.0)
        Lock("name", ttl=40.0)


# -- tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", range(3))
def test_g3_tokens_rise_whichever_nodes_grant_them(nodes, ahead):
    """One node's tokens are far ahead; the next majority does not include it."""
    backend = nodes.backend()
    high = 2 * int(time.time() * 1_000_000)
    nodes[ahead].client.set(f"{{{nodes.prefix}:0}}:2:clock", high)
    tokens = []
    for absent in (None, ahead, *range(3)):
        if absent is not None:
            nodes.fail([absent])
        lease = retried(lambda: grant(backend))
        tokens.append(lease.token)
        assert release(backend, lease) in {"released", "unknown"}
        nodes.heal()
        eventually(lambda: nodes.owners_of("name") == [""] * 3)
    # The first grant may have been decided without the node that is ahead.
    assert tokens == sorted(set(tokens))
    assert tokens[-1] > high


def test_g3_a_token_that_no_majority_has_stored_is_not_granted(nodes, monkeypatch):
    backend = nodes.backend(command_timeout=0.5)
    warm(backend)
    raise_token = RedlockBackend._raise_token

    def cut_before(self, *args):
        nodes.fail([0, 1], "black hole")
        return raise_token(self, *args)

    monkeypatch.setattr(RedlockBackend, "_raise_token", cut_before)
    with pytest.raises(QuorumNotReached):
        acquire(backend)
    nodes.heal()
    eventually(lambda: nodes.owners_of("name") == [""] * 3)


# -- nodes that come back empty ------------------------------------------------------------


@pytest.mark.parametrize("loss", ["restart", "flush"])
def test_g1_a_node_that_lost_its_leases_grants_nothing_until_they_are_over(nodes, loss):
    # The shortest in which two servers answer on a busy machine; this test waits for its end.
    ttl = 2.0
    backend = nodes.backend(options={"max_ttl": ttl}, ttl=ttl)
    nodes.fail([2])
    lease = retried(lambda: grant(backend, request(ttl=ttl)))
    eventually(lambda: not backend._nodes[2].is_busy)
    if loss == "restart":
        nodes[1].restart()
    else:
        nodes[1].client.flushall()
    lost_at = clock.now()
    nodes[2].heal()
    # Two of three nodes have no lease on the name, but one of them had.
    others = nodes.backend(options={"max_ttl": ttl}, ttl=ttl)
    answers = []
    while clock.now() < lease.deadline:
        with contextlib.suppress(QuorumNotReached):
            answer = acquire(others)
            # On a busy machine, the answer may come when the first lease is over.
            answers += [answer] if clock.now() < lease.deadline else []
        # Nor do they say that it is free.
        for answer in (retried(lambda: others.get("name")), locked(others)):
            assert answer or clock.now() >= lease.deadline
    assert not any(isinstance(answer, Lease) for answer in answers)
    eventually(lambda: isinstance(retried(lambda: acquire(others, request(ttl=ttl))), Lease))
    # The node waits from its first answer after the loss on, which came later.
    while True:
        known = nodes[1].client.get(f"{{{nodes.prefix}:0}}:2:node")
        if known is not None and known.endswith(b" joined"):
            break
        assert isinstance(retried(lambda: acquire(others)), Lease | Contention)
    assert clock.now() >= lost_at + ttl


def test_g1_a_node_that_was_restarted_with_its_data_is_kept_out_too(nodes):
    """The last second of its file may be missing."""
    backend = nodes.backend()
    for node in nodes.all[:2]:
        node.client.set(f"{{{nodes.prefix}:0}}:2:node", f"{'a' * 40} joined")
    with pytest.raises(QuorumNotReached, match=r"grants nothing for 3600\.0 s"):
        acquire(backend)
    # The third node's grant is cancelled in the background.
    eventually(lambda: nodes.owners_of("name") == ["", "", ""])


def test_new_servers_vote_when_a_ttl_is_over(nodes):
    for node in nodes.all:
        node.client.flushall()
    ttl = 1.5
    backend = nodes.backend(options={"max_ttl": ttl}, ttl=ttl)
    began = clock.now()
    with pytest.raises(QuorumNotReached, match="grants nothing"):
        acquire(backend, request(ttl=ttl))
    retried(lambda: grant(backend, request(ttl=ttl)))
    # Not before, because each server has joined the quorum since then.
    assert clock.now() > began + 0.9 * ttl


# The lock renews by hand in these tests: what the renewal answers is decided here, and when the
# watchdog sends it elsewhere. So the leases may be longer than any machine stalls.


@pytest.mark.parametrize("how", ["restart", "flush"])
def test_g2_the_loss_of_a_majority_is_reported(nodes, how):
    with configured(dlocks(nodes, TTL=600.0)):
        lock = Lock("name")
        assert lock.acquire()
        eventually(lambda: nodes.owners_of("name") == [lock.owner] * 3)
        for node in nodes.all[:2]:
            if how == "restart":
                node.restart()
            else:
                node.client.flushall()
        with pytest.raises(LeaseLost):
            retried(lock.renew)
        assert lock.lost
        assert lock.lost_reason == "refused"


def test_g1_the_loss_of_a_minority_is_survived(nodes):
    with configured(dlocks(nodes, TTL=600.0)):
        lock = Lock("name")
        assert lock.acquire()
        eventually(lambda: nodes.owners_of("name") == [lock.owner] * 3)
        nodes[1].restart()
        for _ in range(5):
            retried(lock.renew)
            with contextlib.suppress(QuorumNotReached):
                assert not Lock("name", bound=False).acquire(blocking=False)
        lock.check()
        lock.release()


def test_g2_a_first_release_of_a_lease_that_left_no_trace_is_refused(nodes):
    backend = nodes.backend()
    # More leases than the nodes remember.
    for _ in range(20):
        release(backend, grant(backend))
    assert release(backend, grant(backend)._replace(owner="unknown to the nodes")) == "refused"


def test_g2_a_broken_lease_is_reported(nodes):
    with configured(dlocks(nodes, TTL=600.0)):
        lock = Lock("name")
        assert lock.acquire()
        nodes.fail([0])
        assert retried(lambda: locks["default"].break_("name", owner=lock.owner))
        assert not retried(lambda: locks["default"].break_("name", owner="somebody else"))
        with pytest.raises(LeaseLost):
            retried(lock.renew)
        assert lock.lost
        assert lock.lost_reason == "broken"


# -- while it is held, and while somebody waits --------------------------------------------


def test_g6_a_lease_whose_nodes_cannot_answer_keeps_no_other_from_being_renewed(nodes):
    backend = nodes.backend()
    nodes.fail([2])
    on_two = grant(backend, request("on two"))
    # The third has given up, so that the request is not sent to it later.
    eventually(lambda: not backend._nodes[2].is_busy)
    nodes.heal()
    warm(backend)
    on_all = grant(backend, request("on all"))
    eventually(lambda: nodes.owners_of("on all") == [on_all.owner] * 3)
    nodes.fail([0])
    assert renew(backend, on_two, on_all) == ["unanswered", "renewed"]
    nodes.heal()
    eventually(lambda: renew(backend, on_two, on_all) == ["renewed", "renewed"])


def test_g6_a_lock_survives_while_a_part_of_its_nodes_is_away(nodes):
    with configured(dlocks(nodes)):
        on_two, on_all = Lock("on two"), Lock("on all")
        assert on_all.acquire()
        eventually(lambda: nodes.owners_of("on all") == [on_all.owner] * 3)
        nodes.fail([2])
        assert on_two.acquire()
        eventually(lambda: not locks["default"]._nodes[2].is_busy)
        # Before the third node is back, so that no renewal repairs the lease there.
        nodes.fail([0])
        nodes[2].heal()
        renewals = retried(lambda: locks["default"].get("on all")).renewals
        eventually(lambda: locks["default"].get("on all").renewals > renewals)
        with pytest.raises(BackendUnavailable):
            on_two.renew()
        nodes.heal()
        renewals = retried(lambda: locks["default"].get("on two")).renewals
        eventually(lambda: retried(lambda: locks["default"].get("on two")).renewals > renewals)
        for lock in (on_two, on_all):
            lock.check()
            lock.release()


def test_g4_a_waiter_gets_the_lock_though_nodes_come_and_go(nodes):
    with configured(dlocks(nodes)):
        holder, waiter = Lock("name", bound=False), Lock("name", bound=False)
        assert holder.acquire()
        got = []
        thread = threading.Thread(target=lambda: got.append(waiter.acquire()))
        thread.start()
        for number in range(3):
            nodes.fail([number])
            assert holder.held
            nodes.heal()
            warm(locks["default"])
        holder.release()
        thread.join(PATIENCE)
        assert got == [True]
        assert waiter.token > (holder.token or 0)
        waiter.release()


def test_an_acquire_waits_through_an_outage_of_the_majority(nodes):
    with configured(dlocks(nodes)):
        nodes.fail([0, 1])
        got = []
        thread = threading.Thread(target=lambda: got.append(Lock("name").acquire()))
        thread.start()
        with pytest.raises(QuorumNotReached):
            Lock("name", bound=False).acquire(blocking=False)
        nodes.heal()
        thread.join(PATIENCE)
        assert got == [True]


# -- one node slows nobody -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["black hole", "pause"])
def test_g10_a_node_that_does_not_answer_slows_nobody(nodes, how):
    before = set(threading.enumerate())
    backend = nodes.backend(command_timeout=SLOW)
    warm(backend)
    nodes[1].fail(how)
    began = clock.now()
    for _ in range(20):
        lease = grant(backend)
        assert clock.now() - began < 0.9 * SLOW
        assert renew(backend, lease) == ["renewed"]
        assert isinstance(acquire(backend), Contention)
        assert release(backend, lease) == "released"
    assert clock.now() - began < 0.9 * SLOW
    names = [thread.name for thread in threading.enumerate() if thread not in before]
    # Cleanup of an earlier test may have threads of its own.
    assert names.count("dlock-redlock") + names.count("dlock-connect") <= 4


def test_g10_a_node_that_never_connects_slows_nobody_and_costs_one_thread(nodes):
    before = set(threading.enumerate())
    nodes[1].fail("black hole")
    backend = nodes.backend(command_timeout=SLOW)
    began = clock.now()
    for _ in range(20):
        assert release(backend, grant(backend)) == "released"
        assert clock.now() - began < 0.9 * SLOW

    def are_connecting():
        names = [thread.name for thread in threading.enumerate() if thread not in before]
        return names.count("dlock-connect")

    # Those of the other nodes are done, but may not have quite ended.
    eventually(lambda: are_connecting() <= 1, SLOW / 2)


def test_g10_calls_end_by_their_deadline_while_nobody_answers(nodes):
    backend = nodes.backend(command_timeout=1.0)
    lease = retried(lambda: grant(backend))
    nodes.fail(range(3), "black hole")
    for call in (acquire, lambda it: release(it, lease), lambda it: renew(it, lease)):
        began = clock.now()
        with pytest.raises(QuorumNotReached):
            call(backend)
        # Waiting for one node after the other would take three timeouts.
        assert clock.now() - began < 1.0 + 2.0


def test_commands_kept_for_a_dead_node_are_bounded(nodes, monkeypatch):
    backend = nodes.backend()
    nodes.fail([2])
    assert backend.list() == []
    for number in range(5):
        release(backend, grant(backend, request(f"name {number}")))
    node = backend._nodes[2]
    # The node's own thread notes a release that could not be sent.
    eventually(lambda: len(node._kept) >= 5)
    assert node._kept.maxlen == 1000


# -- processes -----------------------------------------------------------------------------


def test_g1_processes_that_split_the_nodes_take_turns(nodes, tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    backend = nodes.backend()
    warm(backend)

    def work() -> None:
        for _ in range(8):
            asked = request(waits=True)
            # A command that takes an earlier attempt back may arrive in between.
            while not isinstance(answer := retried(lambda: acquire(backend, asked)), Lease):  # noqa: B023
                asked = asked._replace(since=asked.since or clock.now())
                until = clock.now() + PATIENCE
                backend.wait(asked, answer, until=until, interrupted=lambda: False)
            seen = int(counter.read_text())
            time.sleep(0.001)
            counter.write_text(str(seen + 1))
            assert release(backend, answer) == "released"

    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                backend.after_fork()
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    nodes[1].fail("refuse")
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert counter.read_text() == "32"


# -- one server under two names ------------------------------------------------------------


def test_a_server_that_is_listed_twice_has_one_vote(nodes):
    urls = [nodes[0].proxy.url, nodes[0].server.url, nodes[1].proxy.url]
    backend = nodes.backend(urls)
    assert release(backend, grant(backend)) == "released"
    nodes.fail([1])
    with pytest.raises(QuorumNotReached, match="same server as another node"):
        acquire(backend)


def test_check_deploy_names_the_nodes_that_cannot_be_used(nodes):
    backend = nodes.backend(command_timeout=5.0)
    assert backend.store_problems() == []
    nodes.fail([2])
    (problem,) = backend.store_problems()
    assert problem.id == "W008"
    assert f"127.0.0.1:{nodes[2].proxy.port}" in problem.message


def test_nodes_are_asked_with_the_arguments_of_their_connections():
    """A password, or a CA file, that stands in ``connection_kwargs`` only."""
    with ExitStack() as stack:
        servers = [stack.enter_context(RedisServer(password="secret")) for _ in range(3)]
        options = AliasOptions(
            *("default", "redlock"),
            location=tuple(f"redis://127.0.0.1:{server.port}" for server in servers),
            command_timeout=5.0,
            options={"connection_kwargs": {"password": "secret"}},
        )
        backend = RedlockBackend(options)
        stack.callback(backend.close)
        assert backend.store_problems() == []
        assert "secret" not in repr(backend.facts(deadline=clock.now() + 5))
