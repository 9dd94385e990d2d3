"""What a lease tells of its renewals."""

from __future__ import annotations

import pytest
from django.utils import timezone

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.local import LocalBackend
from django_dlock.lease import LeaseInfo, LeaseQuery, in_order
from django_dlock.trouble import NO_TROUBLE, trouble


def info(**facts):
    values = {
        "name": "n",
        "alias": "default",
        "kind": "held",
        "owner": "o",
        "token": 1,
        "acquired_at": timezone.now(),
        "age": 100.0,
        "ttl": 30.0,
        "renewals": 1,
        "waiting": 0,
        "process": None,
        "holder_state": "unknown",
        **facts,
    }
    return LeaseInfo(**values)


@pytest.mark.parametrize(
    ("facts", "late"),
    [
        ({"ttl": 14.9, "granted_ttl": 30.0}, True),
        ({"ttl": 15.1, "granted_ttl": 30.0}, False),
        ({"ttl": 0.1, "granted_ttl": 30.0, "renewals": 0}, False),
        ({"ttl": 0.1, "granted_ttl": 30.0, "kind": "parked"}, False),
        ({"ttl": 0.1}, False),
        ({"ttl": None, "granted_ttl": 30.0}, False),
        ({"ttl": 0.1, "granted_ttl": 0.0}, False),
        ({"ttl": 40.0, "granted_ttl": 30.0}, False),
    ],
)
def test_a_renewal_is_late_after_half_the_ttl(facts, late):
    assert info(**facts).is_late is late


def test_what_the_store_does_not_know_is_no_figure():
    unknown = info(unknown=("renewals", "ttl", "waiting"), granted_ttl=90.0)
    assert unknown.renewed_ago is None
    assert not unknown.is_late
    facts = unknown.as_dict()
    assert facts["unknown"] == ["renewals", "ttl", "waiting"]
    assert [facts[fact] for fact in facts["unknown"]] == [None, None, None]
    for fact in ("renewals", "waiting"):
        known = info(**{fact: 0})
        assert in_order([known, unknown], [fact]) == [unknown, known]
        assert in_order([unknown, known], ["-" + fact]) == [known, unknown]


def test_the_last_renewal_is_shown_if_the_backend_knows_the_ttl():
    assert info(ttl=21.0, granted_ttl=30.0).renewed_ago == 9.0
    assert info(ttl=31.0, granted_ttl=30.0).renewed_ago == 0.0
    assert info(ttl=21.0).renewed_ago is None
    assert info(ttl=None, granted_ttl=30.0).renewed_ago is None


@pytest.mark.parametrize(
    ("metadata", "holder"),
    [
        ({"path": "/checkout/"}, "request /checkout/, since "),
        ({"path": "manage.py import_feed"}, "manage.py import_feed, since "),
        ({"task_name": "shop.charge", "task_id": "9f"}, "task shop.charge[9f], since "),
        ({"path": 7}, "7, since "),
        ({}, "since "),
    ],
)
def test_the_holder_is_a_request_a_command_or_a_task(metadata, holder):
    assert info(metadata=metadata).holder.startswith(holder)


def test_a_lease_without_a_process_is_on_no_host():
    assert LeaseQuery().matches(info())
    assert not LeaseQuery(host="w").matches(info())


@pytest.mark.parametrize("sort", [["size"], ["--name"], "name"])
def test_an_unknown_order_is_refused(sort):
    with pytest.raises(ValueError, match=r"sort is .*; it takes a sequence of"):
        LeaseQuery(sort=sort)


@pytest.mark.parametrize("older_than", [-1.0, float("inf"), float("nan")])
def test_a_wrong_age_is_refused(older_than):
    with pytest.raises(ValueError, match=r"older_than is .*; it takes 0 or more seconds"):
        LeaseQuery(older_than=older_than)


@pytest.mark.parametrize("wrong", [{"kind": "hold"}, {"holder_state": "gone"}])
def test_a_list_refuses_what_no_lease_can_have(wrong):
    backend = LocalBackend(AliasOptions(alias="it", backend="unused"))
    ((what, value),) = wrong.items()
    for find in (backend.list, backend.count):
        with pytest.raises(ValueError, match=f"{what} is '{value}'; it takes one of"):
            find(**wrong)


LATE = {"renewals": 2, "ttl": 10.0, "granted_ttl": 30.0}


@pytest.mark.parametrize(
    ("facts", "place"),
    [
        ({"damaged": ("kind",), "holder_state": "alive"}, 0),
        ({"holder_state": "dead", "waiting": 3, **LATE}, 1),
        ({"holder_state": "silent", "waiting": 3, **LATE}, 2),
        ({"holder_state": "alive", "waiting": 3, **LATE}, 3),
        ({"holder_state": "unknown", "waiting": 3}, 4),
        ({"holder_state": "alive", "waiting": 3}, 5),
        ({"holder_state": "alive"}, NO_TROUBLE),
        ({"holder_state": "unknown", "waiting": 0, "unknown": ("waiting",)}, NO_TROUBLE),
        # Not renewed at all, or not by a process.
        ({"holder_state": "alive", **LATE, "renewals": 0}, NO_TROUBLE),
        ({"holder_state": "unknown", **LATE, "kind": "parked"}, NO_TROUBLE),
    ],
)
def test_what_is_wrong_comes_first_in_the_order_of_trouble(facts, place):
    assert trouble(info(**facts)) == place


def test_only_leases_that_somebody_is_known_to_wait_for_are_waited_for():
    query = LeaseQuery(waiting=True)
    assert query.matches(info(waiting=1))
    assert not query.matches(info())
    assert not query.matches(info(unknown=("waiting",)))
