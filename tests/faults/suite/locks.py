"""What keeps the locks: a Redis of their own, or the table in PostgreSQL."""

from __future__ import annotations

from typing import Any, Protocol

import psycopg

from tests.support.workers import DATABASE

__all__ = ["BACKENDS", "DatabaseLocks", "LockStore"]

BACKENDS = ("redis", DATABASE)


class LockStore(Protocol):
    """May be hurt; nothing but locks is in it.

    Attributes:
        url: As ``Site`` takes it.
    """

    @property
    def url(self) -> str: ...

    def restart(self) -> None:
        """Forget all locks."""

    def pause(self) -> None:
        """From now on nobody gets an answer."""

    def resume(self) -> None:
        """They get answers again."""


class DatabaseLocks:
    """The table of leases.

    Args:
        postgres: URL of its database.
    """

    url = DATABASE

    def __init__(self, postgres: str) -> None:
        self._postgres = postgres
        self._blocking: psycopg.Connection[Any] | None = None

    def restart(self) -> None:
        """As somebody does who thinks that nobody needs these rows."""
        with psycopg.connect(self._postgres) as connection:
            connection.execute("DELETE FROM django_dlock_leaserecord")

    def pause(self) -> None:
        self._blocking = psycopg.connect(self._postgres)
        self._blocking.execute("LOCK TABLE django_dlock_leaserecord IN ACCESS EXCLUSIVE MODE")

    def resume(self) -> None:
        if self._blocking is not None:
            self._blocking.close()
            self._blocking = None
