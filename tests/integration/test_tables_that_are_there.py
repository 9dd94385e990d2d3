"""E017 is about tables that are not there; not about those that others make, or may not be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connections
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_dlock import checks
from tests.integration.test_early_migrations import empty
from tests.support import databases


def test_a_project_without_migrations_makes_the_tables(
    tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> None:
    unmigrated = override_settings(MIGRATION_MODULES={"django_dlock": None})
    with django_db_blocker.unblock(), empty("default", "unmigrated", tmp_path) as alias, unmigrated:
        assert checks.check_migrations([alias]) == []
        call_command("migrate", database=alias, verbosity=0, run_syncdb=True, skip_checks=False)
        there = connections[alias].introspection.table_names()
        assert checks.check_migrations([alias]) == []
    assert "django_dlock_lockevent" in there


GRANTS = {
    "mariadb": [
        "CREATE USER {user}@localhost IDENTIFIED BY 'secret'",
        "GRANT SELECT ON {database}.django_migrations TO {user}@localhost",
        "GRANT INSERT ON {database}.django_dlock_lockevent TO {user}@localhost",
    ],
    "postgres": [
        "CREATE ROLE {user} LOGIN PASSWORD 'secret'",
        "GRANT SELECT ON django_migrations TO {user}",
        "GRANT INSERT ON django_dlock_lockevent TO {user}",
    ],
}


@pytest.mark.parametrize("kind", GRANTS)
def test_tables_that_the_user_may_not_read_are_not_missing(
    kind: str, tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> None:
    with django_db_blocker.unblock(), empty(kind, "whole", tmp_path) as alias:
        call_command("migrate", "django_dlock", database=alias, verbosity=0)
        settings = connections[alias].settings_dict
        user = f"u{settings['NAME']}"[:32]
        with connections[alias].cursor() as cursor:
            for grant in GRANTS[kind]:
                cursor.execute(grant.format(user=user, database=settings["NAME"]))
        limited = {**settings, "USER": user, "PASSWORD": "secret"}
        try:
            with databases.added("limited", limited):
                assert checks.check_databases(["limited"]) == []
        finally:
            with connections[alias].cursor() as cursor:
                if kind == "postgres":
                    cursor.execute(f"DROP OWNED BY {user}")
                cursor.execute(f"DROP USER {user}" + ("@localhost" if kind == "mariadb" else ""))
