"""Pages of held locks that a database cannot filter or sort alone, and what they read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.connection import Connection
from django_dlock.backends.database.rows import COLUMNS
from django_dlock.lease import LeaseQuery
from django_dlock.process import current
from tests.support.database_bed import Bed, ask, grant, request, table_of

HELD, PAGE = 40, 7
LEASES = "django_dlock_leaserecord"


@pytest.fixture
def backend(bed: Bed, database: str) -> DatabaseBackend:
    """Has leases of several processes, of which one is dead, and of two kinds; some are waited
    for."""
    backend = bed.backend(database, command_timeout=20.0)
    me = current()
    for number in range(HELD):
        kind = "parked" if number % 5 == 0 else "held"
        metadata = json.dumps({"task_name": f"task {number % 2}"})
        grant(backend, request(f"n{number}", kind=kind, metadata=metadata))
        for _ in range(number % 4 if number < 20 else 0):
            ask(backend, request(f"n{number}", waits=True))
        dead = me._replace(host=f"web-{number % 3}", id=f"dead {number % 3}")
        if number % 2:
            execute(
                backend,
                f"UPDATE {LEASES} SET process = %s WHERE name = %s AND key_prefix = %s",
                (json.dumps(dead.as_dict()), f"n{number}", backend.options.key_prefix),
            )
    for number in range(3):
        backend.deregister(f"dead {number}", deadline=backend.call_deadline())
    return backend


def execute(backend: DatabaseBackend, statement: str, values: Any) -> None:
    def use(one: Connection, store: object) -> int:
        return one.count(statement, values)

    assert table_of(backend).call(use, backend.call_deadline())


class Reads:
    """What statements have returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statements = self.whole_rows = 0
        self.after_first: Any = lambda: None
        rows = Connection.rows

        def counting(one: Connection, statement: str, values: Any = ()) -> Any:
            found = rows(one, statement, values)
            self.statements += 1
            self.whole_rows += sum(len(row) > len(COLUMNS) for row in found)
            after, self.after_first = self.after_first, lambda: None
            after()
            return found

        monkeypatch.setattr(Connection, "rows", counting)


QUERIES = [
    LeaseQuery(sort=("-waiting",)),
    LeaseQuery(sort=("holder",)),
    LeaseQuery(sort=("trouble", "-age")),
    LeaseQuery(waiting=True, sort=("trouble",)),
    LeaseQuery(waiting=True, kind="held"),
    LeaseQuery(sort=("-holder_state", "alias", "-age")),
    LeaseQuery(sort=("holder", "-waiting", "name")),
    LeaseQuery(holder_state="alive", sort=("-age",)),
    LeaseQuery(holder_state="dead", sort=("holder",)),
    LeaseQuery(holder_state="unknown", kind="parked", sort=("name",)),
    LeaseQuery(contains="n1", sort=("-name",)),
    LeaseQuery(contains="task 1", sort=("-waiting",)),
    LeaseQuery(host="web-1", task="task", sort=("ttl",)),
]


def test_a_page_reads_whole_rows_only_of_the_leases_on_it(backend: DatabaseBackend) -> None:
    for query in QUERIES:
        everything = [info.name for info in backend.page(query).infos]
        assert everything
        found = list[str]()
        for offset in range(0, len(everything), PAGE):
            with pytest.MonkeyPatch.context() as patch:
                reads = Reads(patch)
                infos, total = backend.page(query, offset=offset, limit=PAGE)
            assert total == len(everything)
            assert reads.whole_rows == len(infos) <= PAGE
            # The candidates, the page, and the heartbeats of the processes on each.
            assert reads.statements <= 4
            found += [info.name for info in infos]
        assert found == everything, query
        assert backend.page(query, limit=0) == ([], len(everything))


def test_a_lock_that_changes_hands_while_a_page_is_read_is_not_on_it(
    backend: DatabaseBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody waits for these.
    query = LeaseQuery(prefix="n2", holder_state="dead", sort=("name",))
    names = [info.name for info in backend.page(query).infos]
    gone = backend.get(names[0])
    assert gone is not None

    def change_hands() -> None:
        assert backend.break_silently(names[0], owner=gone.owner)
        grant(backend, request(names[0]))

    Reads(monkeypatch).after_first = change_hands
    assert [info.name for info in backend.page(query, limit=3).infos] == names[1:3]
