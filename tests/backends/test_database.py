"""The database backend fulfils the contract on every kind of database."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.testing import BackendContract
from tests.support import databases, postgres
from tests.support.contract_parts import each_command

pytestmark = pytest.mark.quick

KINDS = ("sqlite", "postgres", "mariadb")
"""Each has SQL of its own."""
SAME_SQL = ("memory", "mysqlclient", "pooled")
"""``memory``: the SQL of SQLite on one connection. ``mysqlclient``: that of MariaDB over the other
driver. ``pooled``: that of PostgreSQL behind a PgBouncer, which shares each session among many
clients."""


@pytest.fixture(scope="module")
def leases_alias(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[str]:
    """An alias of ``DATABASES`` for each kind."""
    kind = request.param
    if kind in ("postgres", "mariadb", "mysqlclient"):
        yield request.getfixturevalue(f"{kind}_alias")
        return
    if kind == "pooled":
        request.getfixturevalue("postgres_alias")
        url = request.getfixturevalue("pooler").url_for(request.getfixturevalue("postgres_url"))
        with databases.added(kind, postgres.settings_for(url)):
            yield kind
        return
    name: Any = tmp_path_factory.mktemp("leases") / "project.sqlite3"
    settings = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": name if kind == "sqlite" else ":memory:",
    }
    with databases.added(kind, settings):
        yield kind


@pytest.fixture
def backend(leases_alias: str, django_db_blocker: DjangoDbBlocker) -> Iterator[DatabaseBackend]:
    backend = DatabaseBackend(
        AliasOptions(
            alias="database",
            backend="database",
            key_prefix=f"test-{secrets.token_hex(4)}",
            # Each test has time on a busy machine.
            command_timeout=5.0,
            options={"database": leases_alias},
        )
    )
    with django_db_blocker.unblock():
        yield backend
        backend.close()


@pytest.mark.parametrize("leases_alias", KINDS, indirect=True, scope="module")
class TestDatabase(BackendContract):
    pass


@pytest.mark.parametrize("leases_alias", SAME_SQL, indirect=True, scope="module")
@each_command
class TestDatabaseWithTheSameSQL(BackendContract):
    pass
