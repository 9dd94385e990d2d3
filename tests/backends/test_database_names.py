"""Names and owners are compared exactly on every database, whatever its collation."""

from __future__ import annotations

import pytest
from django.db import connections

from django_dlock.lease import Contention, LeaseRequest
from tests.support.database_bed import Bed, ask, grant, release, renew, request

NAMES = ("a", "A", "a ", "ä", "Ä", "a\u0308", "ß", "ss", "\U0001f512", "\u00a0a")


def test_names_that_collations_take_for_equal_are_different_locks(bed: Bed, database: str) -> None:
    backend = bed.backend(database, command_timeout=5.0)
    leases = [grant(backend, request(name)) for name in NAMES]
    assert renew(backend, *leases) == ["renewed"] * len(NAMES)
    assert {info.name for info in backend.list()} == set(NAMES)
    assert [info.name for info in backend.list(prefix="a")] == ["a", "a ", "a\u0308"]
    assert [info.name for info in backend.list(contains="A")] == ["A"]
    for lease in leases:
        assert isinstance(ask(backend, request(lease.name)), Contention)
        assert release(backend, lease) == "released"
    assert backend.list() == []


def test_key_prefixes_that_collations_take_for_equal_are_different_name_spaces(
    bed: Bed, database: str
) -> None:
    prefixes = ("same", "SAME", "same ", "säme")
    backends = [bed.backend(database, key_prefix=it, command_timeout=5.0) for it in prefixes]
    leases = [grant(backend, request("name")) for backend in backends]
    for backend, lease in zip(backends, leases, strict=True):
        assert [info.owner for info in backend.list()] == [lease.owner]
        assert release(backend, lease) == "released"


@pytest.mark.parametrize("other", ["OWNER", "öwner"])
def test_g1_owners_that_collations_take_for_equal_are_different(
    bed: Bed, database: str, other: str
) -> None:
    backend = bed.backend(database, command_timeout=5.0)
    lease = grant(backend, owned_by("owner"))
    stranger = lease._replace(owner=other)
    assert isinstance(ask(backend, owned_by(other)), Contention)
    assert renew(backend, lease, stranger) == ["renewed", "refused"]
    assert renew(backend, stranger) == ["refused"]
    assert release(backend, stranger) == "refused"
    assert not backend.break_silently("name", owner=other)
    assert release(backend, lease) == "released"
    # The other one has never held it: it is no late copy of the first.
    assert release(backend, grant(backend, owned_by(other))) == "released"


def owned_by(owner: str) -> LeaseRequest:
    return request()._replace(owner=owner)


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_texts_of_leases_take_any_character_whatever_the_databases_own_character_set(
    bed: Bed, database: str
) -> None:
    with connections[database].cursor() as cursor:
        cursor.execute(
            "SELECT DISTINCT collation_name FROM information_schema.columns WHERE "
            "table_schema = DATABASE() AND table_name IN ('django_dlock_leaserecord', "
            "'django_dlock_processrecord') AND character_set_name IS NOT NULL"
        )
        assert cursor.fetchall() == (("utf8mb4_bin",),)
