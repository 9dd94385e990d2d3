"""Databases whose tables were made before 0.1.0, when twelve migrations did what one does now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import Error
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_dlock import checks
from tests.conftest import missing
from tests.support import databases, mariadb, postgres

LAST = "0012_outbox_messages"
EARLY = override_settings(MIGRATION_MODULES={"django_dlock": "tests.support.early_migrations"})


@contextmanager
def empty(kind: str, alias: str, folder: Path) -> Iterator[str]:
    """The alias of an empty database of this kind."""
    if kind == "default":
        engine = {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / f"{alias}.sqlite3"}
        with databases.added(alias, engine):
            yield alias
        return
    server = postgres if kind == "postgres" else mariadb
    try:
        with server.database() as url, databases.added(alias, server.settings_for(url)):
            yield alias
    except (postgres.PostgresNotFound, mariadb.MariadbNotFound) as error:
        missing(str(error))


@pytest.fixture(params=databases.ALL)
def early(
    request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> Iterator[str]:
    with django_db_blocker.unblock(), empty(request.param, "early", tmp_path) as alias:
        yield alias


def schema(alias: str) -> dict[str, Any]:
    """The tables of the package, without the order of their columns."""
    connection = connections[alias]
    found = dict[str, Any]()
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            if table.startswith("django_dlock_"):
                described = connection.introspection.get_table_description(cursor, table)
                keys = connection.introspection.get_constraints(cursor, table).values()
                # Some names of indexes are made from random numbers or from the table's history.
                found[table] = (
                    {column.name: column for column in described},
                    sorted(str({**key, "definition": None}) for key in keys),
                )
        if connection.vendor == "postgresql":
            cursor.execute("SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL")
            found["options"] = sorted(row for row in cursor.fetchall() if "dlock" in row[0])
        if connection.vendor == "mysql":
            cursor.execute(
                "SELECT table_name, column_name, character_set_name, collation_name "
                "FROM information_schema.columns WHERE table_schema = database() "
                "AND table_name LIKE 'django_dlock%'"
            )
            found["options"] = sorted(map(str, cursor.fetchall()))
    return found


def applied(alias: str) -> list[str]:
    """The names of the package's migrations in the database."""
    recorded = MigrationRecorder(connections[alias]).applied_migrations()
    return sorted(name for app, name in recorded if app == "django_dlock")


def test_all_early_migrations_make_what_the_one_of_today_makes(
    early: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["early"]
    with EARLY:
        call_command("migrate", "django_dlock", database=early, verbosity=0)
    assert applied(early)[-1] == LAST
    assert checks.check_migrations([early]) == []
    call_command("migrate", "django_dlock", database=early, verbosity=0, skip_checks=False)
    call_command("migrate", "django_dlock", database=early, verbosity=0, prune=True)
    assert applied(early) == ["0001_initial"]
    with empty(kind, "today", tmp_path) as today:
        call_command("migrate", "django_dlock", database=today, verbosity=0)
        assert schema(early) == schema(today)
        # What the documentation says of removing the package.
        call_command("migrate", "django_dlock", "zero", database=today, verbosity=0)
        assert schema(today).keys() <= {"options"}


@pytest.mark.parametrize(
    ("until", "lacking"),
    [
        ("0001", "django_dlock_fence"),
        ("0007", "django_dlock_idempotencyrecord.message"),
        ("0010", "django_dlock_failoverrecord.in_a_row"),
    ],
)
def test_a_database_with_some_of_them_is_refused(early: str, until: str, lacking: str) -> None:
    with EARLY:
        call_command("migrate", "django_dlock", until, database=early, verbosity=0)
    before = schema(early)
    (error,) = checks.check_migrations([early])
    assert isinstance(error, Error)
    assert error.id == "django_dlock.E017"
    assert lacking in error.msg
    with pytest.raises(SystemCheckError, match=r"E017.*before 0\.1\.0"):
        call_command("migrate", "django_dlock", database=early, verbosity=0, skip_checks=False)
    assert schema(early) == before
    # What the hint says.
    with EARLY:
        call_command("migrate", "django_dlock", database=early, verbosity=0)
    call_command("migrate", "django_dlock", database=early, verbosity=0, skip_checks=False)
    assert checks.check_migrations([early]) == []
