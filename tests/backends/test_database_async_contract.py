"""Coroutines wait for a lock in a database as the contract says."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.testing.contract_waiting import WaitingContract
from tests.support.awaited import Awaited


class AwaitedDatabaseBackend(Awaited, DatabaseBackend):
    pass


@pytest.fixture
def backend(database: str, django_db_blocker: DjangoDbBlocker) -> Iterator[DatabaseBackend]:
    """On SQLite, PostgreSQL and MariaDB."""
    backend = AwaitedDatabaseBackend(
        AliasOptions(
            alias="database",
            backend="database",
            key_prefix=f"test-{secrets.token_hex(4)}",
            # Each test has time on a busy machine.
            command_timeout=5.0,
            options={"database": database},
        )
    )
    with django_db_blocker.unblock():
        yield backend
        backend.close()


class TestAwaitedDatabase(WaitingContract):
    pass
