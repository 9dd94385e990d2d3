"""The store of the locks, and how the demonstration makes it unreachable for a moment."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from testproject.servers import RedisServer


class Locks(Protocol):
    """The store of the locks.

    Attributes:
        name: Its name, for the output.
        ready: What was started, for the output.
        how: How it is made unreachable, for the output.
    """

    name: str
    ready: str
    how: str

    def away(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, no lock can be acquired, renewed or released."""


class RedisLocks:
    """A new Redis."""

    name, how = "Redis", "is stopped (SIGSTOP)"

    def __init__(self, redis: RedisServer) -> None:
        self.url = redis.url
        self.ready = f"Redis runs on port {redis.port}, SQLite is migrated"
        self._redis = redis

    @contextmanager
    def away(self) -> Iterator[None]:
        self._redis.pause()
        try:
            yield
        finally:
            self._redis.resume()


class DatabaseLocks:
    """The project's own database."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.name = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}[kind]
        self.ready = f"{self.name} is migrated"
        self.how = "is blocked by a transaction that locks the leases"

    @contextmanager
    def away(self) -> Iterator[None]:
        with self._locked_file() if self._kind == "sqlite" else self._locked_table():
            yield

    @contextmanager
    def _locked_file(self) -> Iterator[None]:
        from django.conf import settings

        # The backend keeps leases in a separate file, next to that of the project.
        file = f"{settings.DATABASES['default']['NAME']}-dlock"
        with contextlib.closing(sqlite3.connect(file, timeout=10)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.rollback()

    @contextmanager
    def _locked_table(self) -> Iterator[None]:
        from django.db import connection, transaction

        from django_dlock.models import LeaseRecord

        table = connection.ops.quote_name(LeaseRecord._meta.db_table)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield
