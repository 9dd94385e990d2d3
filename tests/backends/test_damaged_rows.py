"""Damaged values in databases, etcd and ZooKeeper: marked, and hiding and stopping nobody."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.lease_file import LeaseFile
from django_dlock.backends.etcd.entries import Entry, encoded
from django_dlock.backends.holder_state import stored_object
from django_dlock.backends.zookeeper.nodes import LockNode, contents
from django_dlock.lease import LeaseQuery
from django_dlock.process import current
from tests.support.database_bed import ask, grant, release, renew, request

LEASES = "django_dlock_leaserecord"
DEEP = "[" * 30_000 + "]" * 30_000

Write = Callable[[str, str, Any], None]
"""Writes one column of the row of a name."""


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def written(request: pytest.FixtureRequest) -> tuple[DatabaseBackend, Write]:
    """A backend, and a stranger's way into its table."""
    if request.param == "sqlite":
        backend = request.getfixturevalue("make_backend")()
        path: Path = LeaseFile(request.getfixturevalue("project_file")).path

        def write_file(name: str, column: str, value: Any) -> None:
            with sqlite3.connect(path) as file:
                file.execute(f"UPDATE {LEASES} SET {column} = ? WHERE name = ?", (value, name))
            file.close()

        return backend, write_file
    alias = request.getfixturevalue(f"{request.param.removesuffix('ql')}_alias")
    backend = request.getfixturevalue("bed").backend(alias, command_timeout=20.0)

    def write(name: str, column: str, value: Any) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"UPDATE {LEASES} SET {column} = %s WHERE name = %s", (value, name))
            assert cursor.rowcount

    return backend, write


def listed(backend: DatabaseBackend) -> dict[str, tuple[str, ...]]:
    infos = backend.page(LeaseQuery(), offset=0, limit=50).infos
    for key in ("holder", "holder_state", "waiting", "trouble"):
        again = backend.page(LeaseQuery(sort=(key,)), offset=0, limit=50).infos
        assert {info.name for info in again} == {info.name for info in infos}
    for info in infos:
        json.dumps(info.as_dict(), allow_nan=False, indent=2)
        assert len(info.holder) < 2000
    return {info.name: info.damaged for info in infos}


@pytest.mark.parametrize(
    ("column", "value", "mark"),
    [
        ("metadata", '{"path": ' + DEEP + "}", "metadata"),
        ("metadata", '{"path": "\\ud800"}', "metadata"),
        ("metadata", '{"path": "' + "x" * 60_000 + '", "y": "' + "x" * 60_000 + '"}', "metadata"),
        ("metadata", "no JSON", "metadata"),
        ("process", json.dumps({**current().as_dict(), "pid": 10**30}), "process"),
        ("process", DEEP, "process"),
        ("kind", "odd", "kind"),
    ],
    ids=["deep", "surrogate", "enormous", "text", "pid", "deep process", "kind"],
)
def test_a_damaged_row_is_marked(written, column, value, mark):
    backend, write = written
    for name in ("a", "name"):
        grant(backend, request(name))
    write("name", column, value)
    assert listed(backend) == {"a": (), "name": (mark,)}
    (first,) = backend.page(LeaseQuery(sort=("trouble",)), limit=1).infos
    # The metadata of all locks would take too long to read.
    assert first.name == ("a" if mark == "metadata" else "name")
    assert backend.get("name").damaged == (mark,)
    assert backend.break_silently("name", owner=backend.get("name").owner)


@pytest.mark.parametrize("column", ["token", "ttl", "granted_at", "ends_at", "renewals", "queue"])
@pytest.mark.parametrize("written", ["sqlite"], indirect=True)
def test_a_column_of_another_type_hides_no_other_row(written, column):
    """SQLite stores a text in a column of numbers."""
    backend, write = written
    for name in ("a", "name"):
        grant(backend, request(name))
    write("name", column, b"\xff" if column == "queue" else "soon")
    assert listed(backend) == {"a": (), "name": ("type",)}
    assert backend.get("a") is not None


def line(**changes: Any) -> str:
    ticket = {
        "owner": "stranger",
        "ttl": 1_000_000,
        "kind": "held",
        "process": "{}",
        "metadata": "{}",
        "channel": "",
        "until": 2**60,
        "since": 1,
        **changes,
    }
    return "\t".join(map(str, ticket.values())) + "\n"


@pytest.mark.parametrize(
    "queue",
    [
        "x\n",
        "\t\t\t\t\t\t\t\n",
        line(ttl="soon"),
        line(ttl=10**400),
        line(ttl=2**62),
        line(ttl=0),
        line(ttl=-1),
        line(until=10**30),
        line(since=10**30),
        line(since="nan"),
        line(ttl=10**400, until="x"),
    ],
    ids=lambda queue: repr(queue[:60]),
)
def test_a_damaged_ticket_stops_nobody(written, queue):
    backend, write = written
    lease = grant(backend, request())
    write("name", "queue", queue)
    assert backend.waiters("name") == []
    assert listed(backend) == {"name": ()}
    waiting = request(waits=True)
    assert ask(backend, waiting).owner == lease.owner
    assert [waiter.owner for waiter in backend.waiters("name")] == [waiting.owner]
    backend.cancel_acquire(waiting, deadline=backend.call_deadline())
    write("name", "queue", queue)
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"
    assert backend.get("name") is None


def test_a_waiter_with_damaged_facts_is_marked(written):
    backend, write = written
    grant(backend, request())
    process = json.dumps({**current().as_dict(), "pid": 10**30})
    write("name", "queue", line(process=process, metadata='{"path": ' + DEEP + "}"))
    (waiter,) = backend.waiters("name")
    assert waiter.damaged == ("process", "metadata")
    json.dumps(waiter.as_dict())


# -- values that need no server ---------------------------------------------------------------

IDENTITY = json.dumps(current().as_dict())
NUMBERS = [10**400, -1, -(10**400), True, "soon", [1], None, 1.5, math.inf, math.nan]


def entry(facts: str, process: str = IDENTITY) -> Entry:
    value = encoded(f"owner {facts}\n{process}\n{{}}")
    return Entry.parse({"value": value, "create_revision": "1", "mod_revision": "1"})


@pytest.mark.parametrize("wrong", NUMBERS, ids=lambda wrong: str(wrong)[:9])
@pytest.mark.parametrize("fact", ["at", "ttl", "renewals"])
def test_a_damaged_number_in_etcd_counts_as_none(fact, wrong):
    sound = {"kind": "held", "at": 1, "ttl": 30}
    found = entry(json.dumps({**sound, fact: wrong}))
    assert found.number(fact) == 0
    assert found.damaged == ("facts",)
    assert entry(json.dumps(sound)).damaged == ()


@pytest.mark.parametrize(
    ("found", "damaged"),
    [
        (entry("", ""), ("facts", "process")),
        (entry('{"kind": ["x"], "at": 1}'), ("kind",)),
        (entry('{"kind": "held"}', process=DEEP), ("process",)),
    ],
    ids=["empty", "kind", "process"],
)
def test_a_damaged_entry_of_etcd_is_marked(found, damaged):
    assert found.damaged == damaged
    assert found.kind == "held"


@pytest.mark.parametrize("wrong", NUMBERS[:-4] + NUMBERS[-2:], ids=lambda wrong: str(wrong)[:9])
def test_a_damaged_number_in_zookeeper_counts_as_none(wrong):
    facts = {"process": current().as_dict(), "metadata": "{}", "ttl": 30.0}
    assert contents(node(json.dumps(facts).encode())).damaged == ()
    found = contents(node(json.dumps({**facts, "ttl": wrong}).encode()))
    assert (found.ttl, found.damaged) == (0.0, ("ttl",))


@pytest.mark.parametrize("data", [b"", b"\xff", DEEP.encode(), b'{"a": ' + DEEP.encode() + b"}"])
def test_a_damaged_node_of_zookeeper_is_marked(data):
    assert contents(node(data)).damaged == ("node",)


def test_damaged_parts_of_a_node_of_zookeeper_are_marked():
    facts = {"process": {"pid": 10**30}, "metadata": "{}", "ttl": 0}
    assert contents(node(json.dumps(facts).encode())).damaged == ("process", "ttl")


def node(data: bytes) -> LockNode:
    return LockNode("/path", "owner", 1, 1.0, data)


def test_any_stored_text_becomes_an_object_that_can_be_written_again():
    hypothesis = pytest.importorskip("hypothesis")
    some = hypothesis.strategies
    values = some.recursive(
        some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
        lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner),
    )
    surrogates = some.text(some.characters(min_codepoint=0xD700, max_codepoint=0xE0FF))

    @hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @hypothesis.given(values.map(json.dumps) | some.text() | surrogates)
    def fuzz(text: str) -> None:
        for stored in (text, f'{{"key": {text}}}', f'{{"key": {json.dumps(text)}}}'):
            found = stored_object(stored)
            json.dumps(found.value, allow_nan=False)
            if found.is_sound:
                json.dumps(found.value, ensure_ascii=False).encode()

    fuzz()


@pytest.mark.parametrize("levels", [60, 64, 65, 900, 100_000])
def test_an_object_may_have_a_bounded_depth(levels):
    found = stored_object('{"a":' * levels + "1" + "}" * levels)
    assert found.is_sound is (levels <= 64)
    json.dumps(found.value, indent=2)
