"""What ``manage.py check`` says of a forgotten ``migrate``, and when it is silent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import django
import pytest

from testproject.processes import free_port
from tests.integration.test_tasks_checks import environment
from tests.support.workers import PATIENCE

pytestmark = pytest.mark.extended

FILES = {
    "manage.py": """
        import os, sys
        from django.core.management import execute_from_command_line
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
        execute_from_command_line(sys.argv)
    """,
    "settings.py": """
        import os
        SQLITE = "django.db.backends.sqlite3"
        SECRET_KEY = "x"
        INSTALLED_APPS = ["django_dlock", "shop"]
        ROOT_URLCONF = "shop"
        DATABASES = {
            "default": {"ENGINE": SQLITE, "NAME": "db.sqlite3", "TEST": {"MIGRATE": False}},
            "ledger": {"ENGINE": SQLITE, "NAME": "ledger.sqlite3"},
            "legacy": {"ENGINE": SQLITE, "NAME": "legacy.sqlite3"},
            "away": {
                "ENGINE": "django.db.backends.postgresql",
                "HOST": "127.0.0.1",
                "PORT": os.environ.get("AWAY", "1"),
                "NAME": "shop",
            },
        }
        DATABASE_ROUTERS = ["shop.Router"]
        DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    """,
    "shop/__init__.py": """
        urlpatterns = []

        class Router:
            def allow_migrate(self, db, app_label, model_name=None, **hints):
                if db == "legacy":
                    return False
                # The ledger has only the records, so that they commit with its rows.
                return db != "ledger" or model_name in ("idempotencyrecord", "followup", None)
    """,
    "shop/tests.py": """
        from django.test import TestCase

        class Empty(TestCase):
            databases = ["default"]

            def test_nothing(self):
                pass
    """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
    return tmp_path


def manage(project: Path, *arguments: str, **more: str) -> str:
    """Everything that a command prints."""
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=project,
        env={**environment(), **more},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.stdout + done.stderr


def test_check_tells_of_a_forgotten_migrate_and_migrate_does_not(project: Path) -> None:
    told = manage(project, "check", "--database", "default")
    assert told.count("django_dlock.W005") == 1
    assert "Run manage.py migrate django_dlock;" in told
    # These are about to do it, or show what would be done.
    for command in (
        ("migrate", "--plan"),
        ("migrate", "--check"),
        ("makemigrations", "--dry-run"),
        ("migrate",),
    ):
        printed = manage(project, *command)
        assert "W005" not in printed, command
        assert "Traceback" not in printed, command
    assert "no issues" in manage(project, "check", "--database", "default")


def test_each_database_counts_if_routers_allow_a_table_of_ours_there(project: Path) -> None:
    manage(project, "migrate")
    assert "no issues" in manage(project, "check", "--database", "legacy")
    told = manage(project, "check", "--database", "default", "--database", "ledger")
    assert told.count("django_dlock.W005") == 1
    assert "'ledger'" in told
    printed = manage(project, "migrate", "--database", "ledger")
    assert "Traceback" not in printed, printed
    assert "no issues" in manage(project, "check", "--database", "ledger")


def test_a_database_that_is_away_is_a_warning_and_no_traceback(project: Path) -> None:
    pytest.importorskip("psycopg")
    told = manage(project, "check", "--database", "away", AWAY=str(free_port()))
    assert "django_dlock.W015" in told
    assert "Traceback" not in told
    assert "DATABASES['away']" in told


def test_a_test_database_made_without_migrations_is_no_forgotten_migrate(project: Path) -> None:
    printed = manage(project, "test", "shop")
    assert "\nOK" in printed, printed
    assert "W005" not in printed


@pytest.mark.skipif(django.VERSION >= (6, 1), reason="there, check asks all databases")
def test_without_a_database_named_no_database_is_asked(project: Path) -> None:
    assert "no issues" in manage(project, "check")
