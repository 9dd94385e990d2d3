"""The database backend fulfils the contract for coroutines, too."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.testing import BackendContract
from tests.support.awaited import METHODS, LoopThread


class AwaitedDatabaseBackend(DatabaseBackend):
    """Runs the async methods of a backend on one event loop, from any thread."""

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._awaited = DatabaseBackend(options)
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()

    def _await(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._starting:
            thread = self._thread = self._thread or LoopThread()
        if method == "wait":
            return thread.run(self._awaited.async_wait(*args, **kwargs))
        return thread.run(self._awaited.acall(method, *args, **kwargs))

    def deregister(self, process: str, *, deadline: float) -> None:
        # Only a backend that has been used has a heartbeat to remove.
        self._awaited.deregister(process, deadline=deadline)

    def after_fork(self) -> None:
        self._awaited.after_fork()
        super().after_fork()
        self._thread, self._starting = None, threading.Lock()

    def close(self) -> None:
        self._awaited.close()
        super().close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()


for _method in METHODS:
    _awaits = functools.partialmethod(AwaitedDatabaseBackend._await, _method)
    setattr(AwaitedDatabaseBackend, _method, _awaits)


@pytest.fixture
def backend(database: str, django_db_blocker: DjangoDbBlocker) -> Iterator[DatabaseBackend]:
    """On SQLite, PostgreSQL and MariaDB."""
    backend = AwaitedDatabaseBackend(
        AliasOptions(
            alias="database",
            backend="database",
            key_prefix=f"test-{secrets.token_hex(4)}",
            options={"database": database},
        )
    )
    with django_db_blocker.unblock():
        yield backend
        backend.close()


class TestAwaitedDatabase(BackendContract):
    pass
