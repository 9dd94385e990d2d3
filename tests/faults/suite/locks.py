"""Where the locks are kept: in a separate Redis, or in a table in PostgreSQL."""

from __future__ import annotations

from typing import Any, Protocol

import psycopg

from tests.support.workers import DATABASE

BACKENDS = ("redis", DATABASE)


class LockStore(Protocol):
    """A store that contains only locks, so faults may disturb it.

    Attributes:
        url: In the form that ``Site`` takes.
    """

    @property
    def url(self) -> str: ...

    def restart(self) -> None:
        """Lose all locks."""

    def pause(self) -> None:
        """From now on, do not answer."""

    def resume(self) -> None:
        """Answer again."""


class DatabaseLocks:
    """The table of leases in PostgreSQL.

    Args:
        postgres: URL of its database.
    """

    url = DATABASE

    def __init__(self, postgres: str) -> None:
        self._postgres = postgres
        self._blocking: psycopg.Connection[Any] | None = None

    def restart(self) -> None:
        """Delete the rows, as somebody might who thinks that nobody needs them."""
        with psycopg.connect(self._postgres) as connection:
            connection.execute("DELETE FROM django_dlock_leaserecord")

    def pause(self) -> None:
        self._blocking = psycopg.connect(self._postgres)
        self._blocking.execute("LOCK TABLE django_dlock_leaserecord IN ACCESS EXCLUSIVE MODE")

    def resume(self) -> None:
        if self._blocking is not None:
            self._blocking.close()
            self._blocking = None
