"""The database's clock steps; the tests change the time that the statements see."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from django_dlock.backends.database import DatabaseBackend
from django_dlock.lease import Contention
from tests.support import databases
from tests.support.database_bed import Bed, ask, grant, release, renew, request, store_of, table_of

Stepped = Callable[[int], DatabaseBackend]


def at_another_time(bed: Bed, database: str, seconds: int) -> str:
    """An alias of the same PostgreSQL, whose sessions see a clock that is ``seconds`` ahead."""
    schema = f"clock_{secrets.token_hex(4)}"
    with connections[database].cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {schema}")
        cursor.execute(
            f"CREATE FUNCTION {schema}.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
            f"$$ SELECT pg_catalog.clock_timestamp() + interval '{seconds} s' $$"
        )
    settings = connections.settings[database]
    # The schema comes first, so its function is found before PostgreSQL's own.
    path = f"-c search_path={schema},pg_catalog,public"
    changed = {**settings, "OPTIONS": {**settings.get("OPTIONS", {}), "options": path}}
    return bed.stack.enter_context(databases.added(f"{database}-{schema}", changed))


@pytest.fixture
def stepped(bed: Bed, database: str, monkeypatch: pytest.MonkeyPatch) -> Stepped:
    """Makes backends over the same leases; the database's clock is ``seconds`` ahead."""
    dialect: Any = type(store_of(bed.backend(database)).dialect)
    true, prefix = dialect.NOW, f"test-{secrets.token_hex(4)}"

    def make(seconds: int) -> DatabaseBackend:
        alias = database
        if connections[database].vendor == "postgresql":
            alias = at_another_time(bed, database, seconds)
        else:
            # A private name, because the clock of a running server cannot be set.
            monkeypatch.setattr(dialect, "NOW", f"({true} + {seconds * 1_000_000})")
        return bed.backend(alias, key_prefix=prefix, command_timeout=5.0)

    return make


def sweep(backend: DatabaseBackend, name: str, *, stays: bool = False) -> None:
    """Sweep the row of a name, and check that it is gone, or that it ``stays``."""
    # By private names, because a sweep begins at a random row.
    table_of(backend).ask(
        lambda one, store, key: store.dialect.sweep(one, key), name, backend.call_deadline()
    )
    assert (table_of(backend).read(name, backend.call_deadline())[1] is not None) is stays


def test_g3_tokens_rise_when_the_clock_steps_back(stepped: Stepped) -> None:
    backend = stepped(0)
    first = grant(backend, request())
    release(backend, first)
    back = stepped(-7200)
    second = grant(back, request())
    assert second.token > first.token
    release(back, second)
    assert grant(stepped(0), request()).token > second.token


@pytest.mark.parametrize("waits", [False, True])
def test_g3_tokens_of_a_name_that_was_swept_rise_when_the_clock_steps_back(
    stepped: Stepped, waits: bool
) -> None:
    backend = stepped(0)
    lease = grant(backend, request())
    release(backend, lease)
    sweep(stepped(3600), "name")
    back = stepped(-7200)
    # An attempt that has waited before reads the row first.
    attempt = request(waits=waits, since=1.0 if waits else 0.0)
    assert grant(back, attempt).token > lease.token


def test_g1_a_step_of_the_clock_under_a_held_lease_lets_nobody_in(stepped: Stepped) -> None:
    lease = grant(stepped(0), request("held"))
    back = stepped(-7200)
    assert isinstance(ask(back, request("held")), Contention)
    # Nobody waits for as long as the step.
    info = back.get("held")
    assert info is not None
    assert info.ttl is not None
    assert info.ttl <= lease.ttl
    assert renew(back, lease) == ["renewed"]
    assert isinstance(ask(back, request("held")), Contention)
    assert release(back, lease) == "released"
    assert release(back, grant(back, request("held"))) == "released"


def test_g5_a_row_that_remembers_how_a_lease_ended_is_not_swept(stepped: Stepped) -> None:
    backend = stepped(0)
    lease = grant(backend, request(ttl=10.0))
    release(backend, lease)
    # A copy of a request may be late by its TTL and two minutes.
    late = stepped(125)
    sweep(late, "name", stays=True)
    assert release(late, lease) == "released"
    sweep(stepped(3600), "name")


def test_g7_a_row_that_remembers_a_cancelled_attempt_is_not_swept(stepped: Stepped) -> None:
    # The attempt is cancelled while another owner, with a much shorter TTL, holds the name.
    backend = stepped(0)
    lease, attempt = grant(backend, request(ttl=1.0)), request(ttl=600.0)
    backend.cancel_acquire(attempt, deadline=backend.call_deadline())
    release(backend, lease)
    late = stepped(600)
    sweep(late, "name", stays=True)
    assert isinstance(ask(late, attempt), Contention)
    assert not late.locked("name", deadline=late.call_deadline())
    sweep(stepped(3600), "name")


def test_g1_the_highest_deleted_token_is_no_lease(stepped: Stepped) -> None:
    backend = stepped(0)
    release(backend, grant(backend, request()))
    sweep(stepped(3600), "name")
    assert backend.list() == []
    assert backend.store_problems() == []
