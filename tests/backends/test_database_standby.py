"""A standby of PostgreSQL takes over while leases are held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from django.core.management import call_command
from pytest_django import DjangoDbBlocker

from django_dlock.backends.database import DatabaseBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Lease
from testproject.servers import ServerNotFound
from tests.conftest import missing
from tests.support import databases
from tests.support.database_bed import Bed, ask, grant, release, renew, request
from tests.support.postgres_standby import Pair, pair


@pytest.fixture
def servers(django_db_blocker: DjangoDbBlocker) -> Iterator[Pair]:
    try:
        with (
            pair() as servers,
            django_db_blocker.unblock(),
            databases.added("pair", servers.settings),
        ):
            call_command("migrate", database="pair", verbosity=0)
            yield servers
    except ServerNotFound as error:
        missing(str(error))


def renewed(backend: DatabaseBackend, *leases: Lease) -> list[str]:
    """The outcomes; a client may first have to find the new primary."""
    found: list[str] = []

    def is_answered() -> bool:
        with suppress(BackendUnavailable):
            found.extend(renew(backend, *leases))
        return bool(found)

    databases.until(is_answered, 30.0)
    return found


def test_g1_leases_and_waiters_survive_a_fail_over_to_a_standby_that_has_them(
    bed: Bed, servers: Pair
) -> None:
    backend = bed.backend("pair", command_timeout=10.0)
    lease, waiter = grant(backend, request(ttl=300.0)), request(waits=True)
    ask(backend, waiter)
    servers.until_replayed()
    servers.fail_over()
    assert renewed(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"
    assert grant(backend, waiter).token > lease.token


def test_g2_a_lease_that_the_new_primary_lacks_is_told_and_tokens_still_rise(
    bed: Bed, servers: Pair
) -> None:
    backend = bed.backend("pair", command_timeout=10.0)
    old = grant(backend, request("known", ttl=300.0))
    servers.until_replayed()
    servers.standby.shut_down()
    # The standby gets none of this.
    lost = grant(backend, request("new", ttl=300.0))
    assert release(backend, old) == "released"
    other = grant(backend, request("known", ttl=300.0))
    servers.fail_over()
    assert renewed(backend, lost, other) == ["refused", "refused"]
    assert grant(backend, request("new")).token > lost.token
    # On the new primary, the released lease lives until its end, or until it is broken.
    assert backend.break_silently("known", owner=old.owner)
    assert grant(backend, request("known")).token > other.token
