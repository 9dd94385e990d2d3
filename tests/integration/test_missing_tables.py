"""A database in which nobody has run ``migrate``: everything says what to run, and nothing else."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.utils import quote
from django.contrib.messages import get_messages
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client
from django.urls import reverse

from django_dlock import checks, locks
from django_dlock.checks.databases import check_migrations
from tests.support import databases, mariadb, postgres
from tests.support.aliases import configured

pytestmark = [pytest.mark.django_db(databases="__all__"), pytest.mark.extended]

EMPTY = "empty"
RUN = f"manage.py migrate django_dlock --database {EMPTY}"
DATABASE = "django_dlock.backends.database.DatabaseBackend"
LOCAL = "django_dlock.backends.local.LocalBackend"
OURS = "django_dlock"


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mariadb"], autouse=True)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """``EMPTY`` is the alias of a database without any table."""
    if request.param == "sqlite":
        file = tmp_path_factory.mktemp("missing") / "db.sqlite3"
        with databases.added(EMPTY, {"ENGINE": "django.db.backends.sqlite3", "NAME": file}):
            yield
        return
    server: Any = postgres if request.param == "postgres" else mariadb
    # Skips the test if the server is not installed.
    request.getfixturevalue(f"{request.param}_url")
    with server.database() as url, databases.added(EMPTY, server.settings_for(url)):
        yield


@pytest.fixture(autouse=True)
def vendor(known: None, db: None) -> Iterator[str]:
    # Without the transaction of the test, which an error would spoil.
    in_transaction = connections[EMPTY]
    del connections[EMPTY]
    yield connections[EMPTY].vendor
    connections[EMPTY].close()
    connections[EMPTY] = in_transaction


class Elsewhere:
    """Routes all of our tables to the empty database."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return EMPTY if model._meta.app_label == OURS else None

    db_for_write = db_for_read


@pytest.fixture
def routed(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [f"{__name__}.Elsewhere"]


def run(*arguments: str, **options: Any) -> str:
    """Everything that the command says; it must fail with 1."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(CommandError) as failed:
        call_command(*arguments, stdout=out, stderr=err, **options)
    assert failed.value.returncode == 1
    return f"{out.getvalue()}{err.getvalue()}{failed.value}"


def assert_says_what_to_run(told: str) -> None:
    assert f"un {RUN}" in told, told
    assert "password" not in told
    assert "Start " not in told


@pytest.mark.parametrize(
    "command",
    [
        ("purge_idempotency_records",),
        ("purge_lock_events",),
        ("purge_fences",),
        ("publish_pending_followups",),
        ("purge_idempotency_records", "--key", "x"),
        ("purge_lock_events", "--name", "x", "--dry-run"),
    ],
)
def test_a_command_about_a_table_says_what_to_run(command: tuple[str, ...]) -> None:
    assert_says_what_to_run(run(*command, "--using", EMPTY))
    told = run(*command, "--using", EMPTY, format="json")
    assert RUN in json.loads(told[: told.rindex("}") + 1])["error"]


@pytest.mark.usefixtures("routed")
def test_to_find_no_table_is_not_to_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    only = {EMPTY: connections.settings[EMPTY]}
    monkeypatch.setattr("django_dlock.records.erasure.tables.connections", _Only(only))
    assert_says_what_to_run(run("purge_lock_events", "--name", "x"))


class _Only:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __getitem__(self, alias: str) -> Any:
        return connections[alias]


@pytest.mark.parametrize("command", ["list_locks", "clear_stale_locks", "diagnose_locks"])
def test_a_command_about_locks_says_what_to_run(command: str, vendor: str) -> None:
    if vendor == "sqlite":
        pytest.skip("SQLite's table of leases is in a file of its own, which is made when needed")
    entry = {"BACKEND": DATABASE, "OPTIONS": {"database": EMPTY, "command_timeout": 5.0}}
    with configured({"default": entry}):
        assert_says_what_to_run(run(command, using="default"))
        (warning,) = (
            it for it in checks.check_alias(locks["default"].options) if it.id.endswith("E010")
        )
        assert RUN in warning.msg


@pytest.mark.parametrize("command", ["switch_locks", "diagnose_locks"])
def test_fail_over_says_what_to_run(command: str) -> None:
    entry = {
        "BACKEND": "django_dlock.backends.failover.FailoverBackend",
        "OPTIONS": {"primary": "one", "standby": "two", "database": EMPTY, "view_ttl": 15.0},
    }
    memory = {"BACKEND": LOCAL}
    with configured({"default": entry, "one": memory, "two": memory}):
        assert_says_what_to_run(run(command, using="default"))


def test_a_forgotten_migrate_is_told_with_the_command() -> None:
    (warning,) = check_migrations([EMPTY])
    assert_says_what_to_run(f"{warning.hint}")


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("page", ["idempotencyrecord", "followup", "lockevent"])
@pytest.mark.parametrize("place", ["changelist", "change"])
def test_a_list_of_the_admin_says_what_to_run(page: str, place: str, admin_client: Client) -> None:
    arguments = ["1"] if place == "change" else []
    answer = admin_client.get(reverse(f"admin:{OURS}_{page}_{place}", args=arguments), follow=True)
    assert answer.status_code == 200
    (message,) = get_messages(answer.wsgi_request)
    assert_says_what_to_run(str(message))


@pytest.mark.usefixtures("routed")
def test_the_statistics_say_what_to_run(admin_client: Client) -> None:
    answer = admin_client.get(reverse(f"admin:{OURS}_lockstatistics_changelist"))
    assert answer.context["migrate"] == f"python {RUN}"


@pytest.mark.usefixtures("routed")
def test_the_page_of_a_lock_says_what_to_run(admin_client: Client) -> None:
    with configured({"default": {"BACKEND": LOCAL}}):
        address = reverse(f"admin:{OURS}_heldlock_change", args=[quote("default/x")])
        page = admin_client.get(address).content.decode()
    assert page.count(f"run {RUN}") == 2
