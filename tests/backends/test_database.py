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

pytestmark = pytest.mark.quick

KINDS = ("sqlite", "memory", "postgres", "pooled", "mariadb")
"""``pooled``: PostgreSQL behind a PgBouncer that shares each session among many clients."""


@pytest.fixture(scope="module", params=KINDS)
def leases_alias(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[str]:
    """An alias of ``DATABASES`` for each kind."""
    kind = request.param
    if kind in ("postgres", "mariadb"):
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


class TestDatabase(BackendContract):
    pass
