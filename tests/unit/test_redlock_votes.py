"""What the answers of a quorum's nodes mean together."""

from __future__ import annotations

import datetime as dt

import pytest

from django_dlock.backends.redlock.broadcast import PENDING
from django_dlock.backends.redlock.votes import Votes
from django_dlock.lease import Contention, Lease, LeaseInfo, RenewalResult

DOWN = ConnectionError("down")
THREE, FIVE = Votes(3, 0.01), Votes(5, 0.01)


def lease(token=1):
    return Lease("name", "me", token, 30.0, 0.0)


def met(owner="rival", remaining=10.0):
    return Contention(owner, "held", remaining, 0.0)


@pytest.mark.parametrize("nodes", [3, 5, 7, 9])
def test_two_quorums_have_a_node_in_common(nodes):
    assert 2 * Votes(nodes, 0.0).quorum > nodes
    assert 2 * (Votes(nodes, 0.0).quorum - 1) < nodes


@pytest.mark.parametrize(
    ("answers", "decided"),
    [
        ([lease(), PENDING, PENDING], False),
        ([lease(), lease(), PENDING], True),
        ([met(), PENDING, PENDING], False),
        ([met(), met(), PENDING], True),
        # The third may still decide it.
        ([met(), lease(), PENDING], False),
        ([DOWN, lease(), PENDING], False),
    ],
)
def test_an_acquire_is_decided_as_soon_as_a_quorum_agrees(answers, decided):
    assert THREE.acquire_decided(answers) is decided


def test_other_owners_are_contention_only_if_a_quorum_has_answered():
    assert THREE.contention([met(), DOWN, DOWN]) is None
    assert THREE.contention([lease(), DOWN, PENDING]) is None
    assert THREE.contention([met(), lease(), DOWN]).owner == "rival"


def test_a_contention_names_the_owner_that_has_most_nodes():
    answers = [met("a"), met("b"), met("b"), met("c"), lease()]
    assert FIVE.contention(answers).owner == "b"
    # A node that names an owner counts more than one that remembers that this request is over.
    assert THREE.contention([met(""), met("a"), lease()]).owner == "a"
    assert THREE.contention([met(""), met(""), met("a")]).owner == ""


def test_a_waiter_waits_until_a_quorum_may_be_free():
    answers = [met(remaining=seconds) for seconds in (30.0, 10.0, 20.0)]
    # Two of three must end before two are free.
    assert 19.5 < THREE.contention(answers).remaining < 20.0
    assert 9.5 < THREE.contention([*answers[:2], lease()]).remaining < 10.0
    assert THREE.contention([met(remaining=0.0)] * 3).remaining > 0


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        (["released", "released", "refused"], "released"),
        (["released", "released", PENDING], "released"),
        (["released", DOWN, "refused"], None),
        (["expired", DOWN, "refused"], "expired"),
        (["refused", "refused", "broken"], "broken"),
        (["released", "refused", "refused"], "refused"),
        (["expired", "released", "expired"], "expired"),
        (["released", DOWN, DOWN], None),
    ],
)
def test_the_outcome_of_a_release(answers, outcome):
    assert THREE.outcome(answers, "released") == outcome


def renewals(*outcomes):
    return [RenewalResult(one, 30.0 if one == "renewed" else 0.0) for one in outcomes]


def test_each_lease_of_a_renewal_is_judged_by_itself():
    answers = [renewals("renewed", "renewed"), renewals("refused", "renewed"), DOWN]
    results = THREE.renewals(answers)
    assert [one.outcome for one in results] == ["unanswered", "renewed"]
    assert 29.6 < results[1].ttl < 29.7


def test_a_renewal_waits_for_whoever_can_still_decide_it():
    first = renewals("renewed", "renewed")
    assert not THREE.renewals_decided([first, PENDING, PENDING])
    assert THREE.renewals_decided([first, first, PENDING])
    mixed = renewals("refused", "renewed")
    assert not THREE.renewals_decided([first, mixed, PENDING])
    assert THREE.renewals_decided([first, mixed, DOWN])
    assert THREE.renewals_decided([[], [], PENDING])


def test_a_name_counts_as_taken_while_that_is_in_doubt():
    assert THREE.locked([True, False, DOWN])
    assert THREE.locked([True, True, False])
    assert not THREE.locked([False, False, True])
    assert not THREE.locked_decided([True, False, PENDING])


def test_the_possible_clock_drift_is_subtracted():
    assert Votes(3, 0.1).certain(10.0) == pytest.approx(8.998)


def info(**facts):
    at = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
    seen = {"ttl": 30.0, "renewals": 1, "granted_ttl": 30.0, "silent_for": 2.0, **facts}
    return LeaseInfo(
        name="name",
        alias="a",
        kind="held",
        owner="me",
        token=1,
        acquired_at=at,
        age=50.0,
        waiting=0,
        process=None,
        holder_state="alive",
        **seen,
    )


def test_a_node_that_missed_renewals_makes_no_lease_look_late():
    missed = info(ttl=70.0, granted_ttl=90.0, renewals=0, silent_for=14.0)
    renewed = info(ttl=29.0)
    merged = THREE.lease([renewed, info(ttl=28.0), missed])
    # A quorum has it for 29 seconds; that node's own TTL says nothing about the renewal.
    assert (merged.ttl, merged.granted_ttl) == (29.0, 30.0)
    assert not merged.is_late
    assert merged.silent_for == 2.0
    assert THREE.lease([info(silent_for=None), info(silent_for=None)]).silent_for is None
