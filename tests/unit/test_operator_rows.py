"""Every store makes the rows that operators see in the same way."""

from __future__ import annotations

import json

import pytest

from django_dlock.backends.operator_rows import lease_row, waiter_row
from django_dlock.process import current

LEASE = {"name": "it", "alias": "default", "owner": "o", "token": 7}
TIMES = {"now": 100.0, "at": 90.0, "ttl": 20.0}


def identity():
    return json.dumps(current().as_dict())


def test_what_the_store_does_not_know_is_named():
    row = lease_row(**LEASE, **TIMES, process=identity(), metadata="{}")
    assert row.unknown == ("renewals", "waiting")
    assert (row.renewals, row.waiting, row.granted_ttl, row.silent_for) == (0, 0, None, None)
    row = lease_row(**LEASE, **TIMES, renewals=-1, waiting=2, ttl_known=False)
    assert row.unknown == ("ttl",)
    assert (row.renewals, row.waiting, row.ttl) == (0, 2, 20.0)


@pytest.mark.parametrize("stored", [identity, current], ids=["text", "identity"])
def test_a_process_is_read_from_what_is_stored(stored):
    row = lease_row(**LEASE, **TIMES, process=stored(), metadata='{"task_name": "shop.charge"}')
    assert (row.process, row.holder_state, row.damaged) == (current(), "alive", ())
    assert row.metadata == {"task_name": "shop.charge"}


def test_no_process_is_no_damage():
    for nobody in (None, ""):
        row = lease_row(**LEASE, **TIMES, process=nobody)
        assert (row.process, row.holder_state, row.damaged) == (None, "unknown", ())


def test_what_a_stranger_wrote_is_marked():
    row = lease_row(
        **LEASE, **TIMES, kind="mine", process="[1]", metadata="no json", damaged=("facts",)
    )
    assert row.damaged == ("kind", "facts", "process", "metadata")
    assert (row.kind, row.process, row.metadata) == ("held", None, {})
    waiter = waiter_row(
        name="it", alias="default", owner="o", now=1.0, since=0.0, process="[1]", metadata=["x"]
    )
    assert waiter.damaged == ("process", "metadata")


def test_nothing_was_granted_in_the_future():
    row = lease_row(**LEASE, now=100.0, at=200.0, ttl=1.0)
    assert (row.age, row.acquired_at.timestamp()) == (0.0, 100.0)


def test_a_waiter_that_listens_is_alive_whatever_its_process():
    said = {"name": "it", "alias": "default", "owner": "o", "now": 100.0, "since": 90.0}
    silent = waiter_row(**said, process=identity(), silent=True)
    assert (silent.state, silent.waited) == ("silent", 10.0)
    assert waiter_row(**said, process=identity(), silent=True, listens=True).state == "alive"
    assert waiter_row(**said, listens=True).state == "alive"
    gone = waiter_row(**said, process=identity(), listens=True, deregistered=True)
    assert gone.state == "dead"
    assert waiter_row(**said).state == "unknown"
