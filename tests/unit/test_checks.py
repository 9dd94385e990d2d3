"""System checks: each id, and no messages for correct settings."""

from __future__ import annotations

import ast
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core import checks as django_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import OperationalError, connection, connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

import django_dlock
from django_dlock import checks, locks
from django_dlock.backends.base import AliasOptions, Problem
from django_dlock.backends.local import LocalBackend
from django_dlock.checks import databases as database_checks
from django_dlock.operators.task_url import url_of_task
from django_dlock.records import idempotency
from django_dlock.records.idempotency import ClaimRequest

REDIS = "django_dlock.backends.redis.RedisBackend"
LOCAL = "django_dlock.backends.local.LocalBackend"
DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"


def ids(messages: list[django_checks.CheckMessage]) -> list[str]:
    return [str(message.id).removeprefix("django_dlock.") for message in messages]


def entry(location: str = "redis://h/0", **more: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": REDIS, "LOCATION": location, **more}}


class Several(LocalBackend):
    """A backend on more than one server."""

    @classmethod
    def problems(cls, options: AliasOptions) -> list[Problem]:
        return []


def several(*locations: str) -> dict[str, Any]:
    return {"default": {"BACKEND": f"{__name__}.Several", "LOCATION": locations}}


def cache(location: Any, backend: str = DJANGO, **options: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}}


def own_cache(url: str, default: str = "redis://h/1") -> dict[str, Any]:
    """``default`` and a cache called ``locks``."""
    return {**cache(default), "locks": cache(url)["default"]}


def by_cache(alias: str, **more: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": REDIS, "CACHE": alias, **more}}


@pytest.mark.django_db  # From Django 6.1 on, the command uses all databases.
def test_the_checks_are_part_of_manage_py_check() -> None:
    with (
        override_settings(DLOCKS={"default": {"BACKEND": 7}}),
        pytest.raises(SystemCheckError) as refused,
    ):
        call_command("check")
    assert "django_dlock.E004" in str(refused.value)


def test_correct_settings_give_no_message() -> None:
    found = checks.check_settings() + checks.check_shared_caches()
    assert found == []


def test_every_id_in_the_code_belongs_to_one_message() -> None:
    root = Path(django_dlock.__file__).parent
    places: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = re.fullmatch(r"django_dlock\.([EIW]\d{3})", node.value)
                if found:
                    places.setdefault(found[1], set()).add(f"{file}:{node.lineno}")
    assert {check_id for check_id, where in places.items() if len(where) > 1} == set()
    assert {"E008", "W001", "W002", "W004", "W005"} <= set(places)


# -- errors --------------------------------------------------------------------------------


def test_a_problem_of_the_settings_is_an_error_with_its_hint() -> None:
    with override_settings(DLOCKS=entry(TTLL=3)):
        (error,) = checks.check_settings()
    assert (error.id, error.level) == ("django_dlock.E003", django_checks.ERROR)
    assert "'TTLL'" in error.msg
    assert "'TTL'" in str(error.hint)


@pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")
def test_a_project_without_a_store_for_locks_gets_an_error() -> None:
    memory = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    with override_settings(DLOCKS=None, CACHES=memory, DATABASES={}):
        (error,) = checks.check_settings()
    assert error.id == "django_dlock.E002"
    assert "not a Redis cache" in error.msg


@pytest.mark.django_db
def test_i001_without_settings_a_message_says_that_the_database_keeps_the_locks() -> None:
    memory = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    with override_settings(DLOCKS=None, CACHES=memory):
        assert checks.check_settings() == []
        assert ids(checks.check_deployment()) == ["I001"]
        # Explicit settings get no such message.
        backend = {"BACKEND": "django_dlock.backends.database.DatabaseBackend"}
        with override_settings(DLOCKS={"default": backend}):
            assert checks.check_settings() == checks.check_deployment() == []


@pytest.mark.parametrize(
    "dlocks",
    [
        {"default": {"BACKEND": "nowhere.Backend"}},
        {"default": {"BACKEND": "django.http.HttpRequest"}},
        entry(OPTIONS={"colour": "red"}),
    ],
)
def test_e008_a_backend_that_cannot_be_made(dlocks: dict[str, Any]) -> None:
    with override_settings(DLOCKS=dlocks):
        assert ids(checks.check_settings()) == ["E008"]


class Picky(LocalBackend):
    """A backend of another package, with its own id."""

    @classmethod
    def problems(cls, options: AliasOptions) -> list[Problem]:
        return [Problem("shop.E001", "Not this one.", "Take another.")]


def test_a_backend_of_another_package_gives_its_own_ids() -> None:
    with override_settings(DLOCKS={"default": {"BACKEND": f"{__name__}.Picky"}}):
        (error,) = checks.check_settings()
    assert error.id == "shop.E001"


# -- W001 ----------------------------------------------------------------------------------

SHARED = [
    (entry("redis://h:6379/0"), cache("redis://h")),
    (entry("redis://user:secret@localhost/2"), cache("redis://127.0.0.1:6379/2")),
    (entry("rediss://h/1"), cache(["redis://h/1", "redis://replica/1"])),
    (entry("redis://h/1"), cache("redis://h/1;redis://replica/1")),
    (entry("redis://h?db=3"), cache("redis://h", db=3)),
    (entry("redis://h/3"), cache("redis://h/3", db=4)),
    (entry("unix:///run/redis.sock?db=1"), cache("unix:///run/redis.sock?db=1")),
    (entry("redis://h/4"), cache("redis://h/4", DJANGO_REDIS)),
    (several("redis://a/4", "redis://h/4"), cache("redis://h/4")),
    (entry("redis://h/4"), cache("redis://h", DJANGO_REDIS, CONNECTION_POOL_KWARGS={"db": 4})),
    (by_cache("default"), cache("redis://h/0")),
    # Another cache uses the database of the locks' own cache.
    (by_cache("locks"), own_cache("redis://h/1")),
    (by_cache("locks", OPTIONS={"connection_kwargs": {"db": 1}}), own_cache("redis://h/0")),
    # The alias does not name this cache.
    (entry("redis://h/0"), own_cache("redis://h/0")),
    (None, cache("redis://h/0")),
]

APART = [
    (entry("redis://h/0"), cache("redis://h/1")),
    (entry("redis://h/0"), cache("redis://other/0")),
    (entry("redis://h:6380/0"), cache("redis://h/0")),
    (entry("unix:///run/redis.sock"), cache("unix:///run/other.sock")),
    (entry(OPTIONS={"connection_kwargs": {"db": 5}}), cache("redis://h/0")),
    (entry(), {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}),
    ({"default": {"BACKEND": LOCAL}}, cache("redis://h/0")),
    (by_cache("locks"), own_cache("redis://h/0")),
    # Another check, or the cache, reports a wrong port.
    (entry("redis://h:port/0"), cache("redis://h/0")),
    (entry(), cache("redis://:a/b@h/0")),
]


@pytest.mark.parametrize(("dlocks", "caches"), SHARED)
def test_w001_locks_in_the_database_of_a_cache(dlocks: Any, caches: Any) -> None:
    with override_settings(DLOCKS=dlocks, CACHES=caches):
        (warning,) = checks.check_shared_caches()
    assert warning.id == "django_dlock.W001"
    assert "secret" not in f"{warning.msg}{warning.hint}"


def test_w001_names_another_server_if_caches_use_all_databases() -> None:
    caches = {f"c{number}": cache(f"redis://h/{number}")["default"] for number in range(16)}
    with override_settings(DLOCKS=entry("redis://h/0"), CACHES=caches):
        (warning,) = checks.check_shared_caches()
    assert warning.hint == "Use another server for the locks."


@pytest.mark.parametrize(("dlocks", "caches"), APART)
def test_locks_and_caches_in_different_databases_give_no_warning(dlocks: Any, caches: Any) -> None:
    with override_settings(DLOCKS=dlocks, CACHES=caches):
        assert checks.check_shared_caches() == []


@pytest.mark.parametrize("used_by", ["SESSION_CACHE_ALIAS", "CACHE_MIDDLEWARE_ALIAS"])
def test_w001_the_cache_of_the_locks_is_used_by_django(used_by: str) -> None:
    caches = own_cache("redis://h/0")
    with override_settings(DLOCKS=by_cache("locks"), CACHES=caches, **{used_by: "locks"}):
        (warning,) = checks.check_shared_caches()
    assert "with the caches ['locks']" in warning.msg


HINTS = [
    (
        entry("redis://h/0"),
        cache("redis://h/0"),
        "Name another database in DLOCKS['default']['LOCATION'], as in \"redis://host:6379/1\".",
    ),
    (
        entry("unix:///run/redis.sock"),
        cache("unix:///run/redis.sock"),
        "Name another database in DLOCKS['default']['LOCATION'], as in \"unix:///path?db=1\".",
    ),
    (
        by_cache("default"),
        cache("redis://h/0"),
        (
            "Give the locks a cache of their own in another database, "
            "\"LOCATION\": \"redis://host:6379/1\", and name it in DLOCKS['default']['CACHE']."
        ),
    ),
    (
        by_cache("locks"),
        own_cache("redis://h/1"),
        'Give CACHES[\'locks\'] a database of its own, "LOCATION": "redis://host:6379/0".',
    ),
    (
        by_cache("default", OPTIONS={"connection_kwargs": {"db": 1}}),
        cache("redis://h/1"),
        (
            'Keep the locks in another database, "db": 0, in '
            "DLOCKS['default']['OPTIONS']['connection_kwargs']."
        ),
    ),
]


@pytest.mark.parametrize(("dlocks", "caches", "hint"), HINTS)
def test_the_hint_of_w001_fits_the_settings(dlocks: Any, caches: Any, hint: str) -> None:
    with override_settings(DLOCKS=dlocks, CACHES=caches):
        (warning,) = checks.check_shared_caches()
    assert warning.hint == hint


def test_without_dlocks_the_hint_of_w001_is_a_line_that_can_be_copied() -> None:
    with override_settings(DLOCKS=None, CACHES=cache("redis://h/0")):
        (warning,) = checks.check_shared_caches()
        copied: dict[str, Any] = {}
        exec(str(warning.hint).partition(": ")[2], copied)
        with override_settings(DLOCKS=copied["DLOCKS"]):
            assert checks.check_shared_caches() == []
            assert checks.check_settings() == []


def test_wrong_settings_are_reported_once_and_not_by_every_check() -> None:
    with override_settings(DLOCKS={"default": {"BACKEND": 7}}):
        assert checks.check_shared_caches() == []
        assert checks.check_deployment() == []


# -- deployment ----------------------------------------------------------------------------


def test_w002_locks_of_one_process() -> None:
    with override_settings(DLOCKS={"default": {"BACKEND": LOCAL}}):
        assert ids(checks.check_deployment()) == ["W002"]


def test_w004_sqlite_with_deferred_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": "/x.sqlite3", "OPTIONS": {}}
    with override_settings(DLOCKS={"default": {"BACKEND": LOCAL}}):
        monkeypatch.setattr(connections, "settings", {"default": sqlite})
        assert ids(checks.check_deployment()) == ["W002", "W004"]
        for cured in (
            {**sqlite, "OPTIONS": {"transaction_mode": "immediate"}},
            {**sqlite, "NAME": ":memory:"},
            {**sqlite, "ENGINE": "django.db.backends.postgresql"},
        ):
            monkeypatch.setattr(connections, "settings", {"default": cured})
            assert ids(checks.check_deployment()) == ["W002"]


@pytest.mark.django_db
def test_w005_migrations_that_are_not_applied() -> None:
    assert checks.check_migrations(databases=["default"]) == []
    assert checks.check_migrations() == []
    # A test database that was made without migrations has the tables, and no record of them.
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = 'django_dlock'")
    assert checks.check_migrations(databases=["default"]) == []
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_dlock_fence RENAME TO elsewhere")
    (warning,) = checks.check_migrations(databases=["default"])
    assert warning.id == "django_dlock.W005"
    assert "0001_initial" in warning.msg


@pytest.mark.django_db
def test_w015_a_database_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def executor(connection: object) -> None:
        raise OperationalError("connection refused\n\tIs the server running?")

    monkeypatch.setattr("django.db.migrations.executor.MigrationExecutor", executor)
    (warning,) = checks.check_databases(databases=["default"])
    assert warning.id == "django_dlock.W015"
    assert "applied: connection refused Is the server running?" in warning.msg
    assert "DATABASES['default']" in warning.hint


@pytest.mark.django_db
def test_w007_runs_under_an_alias_that_is_not_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_records() == []
    request = ClaimRequest("s", "k", "p", timedelta(1), "gone", "n", "o")
    claimed = idempotency.claim(request, holds=lambda *holder: True)
    assert isinstance(claimed, idempotency.Claim)
    (warning,) = checks.check_records(databases=["default"])
    assert warning.id == "django_dlock.W007"
    assert "'gone'" in warning.msg
    # In a large table only the latest records are read, by their primary key.
    monkeypatch.setattr(database_checks, "LATEST_RECORDS", 2)
    for key in ("another", "a third"):
        assert checks.check_records(databases=["default"]) == [warning]
        later = ClaimRequest("s", key, "p", timedelta(1), "default", "n", "o")
        idempotency.claim(later, holds=lambda *holder: True)
    with CaptureQueriesContext(connection) as queries:
        assert checks.check_records(databases=["default"]) == []
    for query in queries:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN QUERY PLAN {query['sql']}")
            plan = str(cursor.fetchall())
        assert "USING INTEGER PRIMARY KEY" in plan or "SEARCH" in plan, plan
    monkeypatch.undo()
    idempotency.complete(claimed)
    assert checks.check_records(databases=["default"]) == []
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_dlock_idempotencyrecord RENAME TO elsewhere")
    assert checks.check_records(databases=["default"]) == []


# -- the app -------------------------------------------------------------------------------


def test_changed_settings_are_used_at_once() -> None:
    before = locks["default"]
    with override_settings(DLOCKS={"default": {"BACKEND": LOCAL}}):
        assert type(locks["default"]).__name__ == "LocalBackend"
    assert type(locks["default"]) is type(before)
    assert locks["default"].options.location == settings.DLOCKS["default"]["LOCATION"]


# -- names, and what does not fit together --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("DLOCK_METRIC", "DLOCK_METRICS"),
        ("DLOCK_TRACE", "DLOCK_TRACING"),
        ("DLOCK_SCOPES", "DLOCK_SCOPE"),
        ("DLOCK_", "DLOCKS"),
        ("DLOCK", "DLOCKS"),
        ("DLOCKS_METRICS", "DLOCK_METRICS"),
    ],
)
def test_w026_a_misspelt_setting(name: str, nearest: str) -> None:
    with override_settings(**{name: {}}):
        (warning,) = checks.check_names()
    assert warning.id == "django_dlock.W026"
    assert warning.msg.startswith(f"{name} is no setting of django_dlock")
    assert warning.msg.endswith(f"nearest name is {nearest}.")


def test_settings_of_others_are_no_misspelt_settings() -> None:
    with override_settings(DLOCKING=1, MY_DLOCK_METRIC=1, DLOCK_METRICS={}, DLOCK_SCOPE=None):
        assert checks.check_names() == []


@pytest.mark.parametrize(("max_hold", "found"), [(29, ["W027"]), (30, []), (31, [])])
def test_w027_locks_that_are_never_renewed(max_hold: int, found: list[str]) -> None:
    with override_settings(DLOCKS=entry(TTL=30, MAX_HOLD=max_hold)):
        messages = checks.check_settings()
        locks.reset()
    assert ids(messages) == found
    assert all("DLOCKS['default']['MAX_HOLD'] is 29 s" in message.msg for message in messages)


@pytest.mark.django_db
@pytest.mark.parametrize("value", [{}, [], "redis://h/0", {"default": None}, {1: {}}])
def test_check_deploy_tells_of_wrong_settings(value: Any) -> None:
    with (
        override_settings(DLOCKS=value),
        pytest.raises(SystemCheckError, match=r"django_dlock\.E00[12]"),
    ):
        call_command("check", deploy=True)


class Unprepared(LocalBackend):
    """A backend of a project that does not expect every value."""

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        int(options.options["size"])

    @classmethod
    def problems(cls, options: AliasOptions) -> list[Problem]:
        return []


class UnpreparedCheck(LocalBackend):
    @classmethod
    def problems(cls, options: AliasOptions) -> list[Problem]:
        return [Problem("E008", "large", "") for _ in range(int(options.options["size"]))]


@pytest.mark.parametrize("backend", ["Unprepared", "UnpreparedCheck"])
def test_e008_a_backend_of_a_project_that_raises(backend: str) -> None:
    alias = {"BACKEND": f"{__name__}.{backend}", "OPTIONS": {"size": "secret"}}
    with override_settings(DLOCKS={"default": alias}):
        (error,) = checks.check_settings()
        # It says nothing of the alias, and does not raise.
        checks.check_deployment()
        locks.reset()
    assert error.id == "django_dlock.E008"
    assert "DLOCKS['default']" in error.msg
    assert "ValueError" in error.msg
    assert "secret" not in error.msg


class Unshowable:
    """A value whose text cannot be made."""

    def __repr__(self) -> str:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("name", "check", "id_"),
    [
        ("DLOCKS", checks.check_settings, "E001"),
        ("DLOCK_ADMIN", checks.check_admin, "E013"),
        ("DLOCK_METRICS", checks.check_metrics, "E014"),
        ("DLOCK_TRACING", checks.check_tracing, "E015"),
        ("DLOCK_SCOPE", checks.check_scope, "E016"),
    ],
)
def test_a_value_that_cannot_be_shown_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str, check: Any, id_: str
) -> None:
    monkeypatch.setattr(settings, name, Unshowable(), raising=False)
    messages = check()
    assert ids(messages) == [id_]
    assert "Unshowable() without a repr" in messages[0].msg


def test_texts_that_are_read_later_are_texts() -> None:
    def later(text: str) -> Any:
        return SimpleLazyObject(lambda: text)

    url = "https://flower.example.com/{task_id}"
    alias = {"BACKEND": later(LOCAL), "KEY_PREFIX": later("shop")}
    with override_settings(DLOCKS={"default": alias}, DLOCK_ADMIN={"TASK_URL": later(url)}):
        assert [*checks.check_settings(), *checks.check_admin()] == []
        assert url_of_task("1") == "https://flower.example.com/1"
        assert locks["default"].options.key_prefix == "shop"
        locks.reset()
