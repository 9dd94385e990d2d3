"""Redis, the databases and the local backend answer the same calls in the same way."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions, BaseLockBackend
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.local import LocalBackend
from django_dlock.backends.redis import RedisBackend
from testproject.servers import RedisServer
from tests.support import databases
from tests.support.fuzzing import examples
from tests.support.lease_comparison import DIFFERENCES, listening
from tests.support.lease_states import known_paths, states

Stores = dict[str, BaseLockBackend]


@pytest.fixture
def stores(
    redis_server: RedisServer, tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> Iterator[Stores]:
    """Those that need no server but Redis."""
    redis = RedisBackend(alias(location=redis_server.url))
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
    with ExitStack() as stack:
        stack.callback(redis.close)
        stack.enter_context(databases.added("file", sqlite))
        stack.enter_context(django_db_blocker.unblock())
        database = DatabaseBackend(alias(options={"database": "file"}))
        stack.callback(database.close)
        listening(redis)
        yield {"redis": redis, "sqlite": database, "local": LocalBackend(alias())}


@pytest.fixture
def all_stores(stores: Stores, postgres_alias: str, mariadb_alias: str) -> Iterator[Stores]:
    with ExitStack() as stack:
        for name in (postgres_alias, mariadb_alias):
            database = DatabaseBackend(alias(options={"database": name}))
            stack.callback(database.close)
            stores[name] = database
        listening(stores[postgres_alias])
        yield stores


def alias(**options: Any) -> AliasOptions:
    # The machine may have other work.
    prefix = f"states-{secrets.token_hex(4)}"
    return AliasOptions("states", "", key_prefix=prefix, command_timeout=5.0, **options)


def compare(stores: Stores, count: int, steps: int) -> None:
    run_state_machine_as_test(
        states(stores),
        settings=settings(
            examples(count),
            stateful_step_count=steps,
            # To shorten an example that fails takes minutes.
            phases=(Phase.generate,),
            report_multiple_bugs=False,
        ),
    )


def test_redis_sqlite_and_local_have_the_same_states_of_a_lease(stores: Stores) -> None:
    compare(stores, 60, 30)


def test_known_differences_between_stores_are_gone(stores: Stores) -> None:
    known_paths(stores)


def test_postgresql_and_mariadb_have_the_same_states_of_a_lease(all_stores: Stores) -> None:
    known_paths(all_stores)
    compare(all_stores, 10, 30)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_where_stores_differ_the_documentation_says_so(what: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"
    assert DIFFERENCES[what].documented in page.read_text(encoding="utf-8")
