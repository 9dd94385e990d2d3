"""Fixtures for the tests of the backends."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from tests.support import databases, redis_calls
from tests.support.database_bed import Bed
from tests.support.lease_files import MakeBackend
from tests.support.proxy import Proxy


@pytest.fixture(autouse=True)
def backends_are_closed() -> Iterator[None]:
    """Close all backends, so that the garbage collector does not finalize an open socket first."""
    yield
    while redis_calls.MADE:
        redis_calls.MADE.pop().close()


@pytest.fixture
def bed(django_db_blocker: DjangoDbBlocker) -> Iterator[Bed]:
    bed = Bed()
    with django_db_blocker.unblock(), bed.stack:
        yield bed


@pytest.fixture
def postgres_proxy(postgres_url: str) -> Iterator[Proxy]:
    parts = urlsplit(postgres_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 5432, speaks="postgres") as proxy:
        yield proxy


@pytest.fixture
def mariadb_proxy(mariadb_url: str) -> Iterator[Proxy]:
    parts = urlsplit(mariadb_url)
    with Proxy(parts.hostname or "127.0.0.1", parts.port or 3306, speaks="amqp") as proxy:
        yield proxy


@pytest.fixture
def project_file(django_db_blocker: DjangoDbBlocker) -> Iterator[Path]:
    """The file of a project's database, known as the alias ``file``."""
    # Other users cannot reach into pytest's own directories.
    directory = tempfile.TemporaryDirectory(prefix="dlock-sqlite-")
    Path(directory.name).chmod(0o755)
    path = Path(directory.name) / "project.sqlite3"
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    with directory, databases.added("file", settings), django_db_blocker.unblock():
        yield path


@pytest.fixture
def make_backend(project_file: Path) -> Iterator[MakeBackend]:
    """Makes backends that keep their leases beside ``project_file``."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> DatabaseBackend:
            # The machine may have other work.
            options.setdefault("command_timeout", 20.0)
            backend = DatabaseBackend(
                AliasOptions("file", "database", options={"database": "file"}, **options)
            )
            stack.callback(backend.close)
            return backend

        yield make
