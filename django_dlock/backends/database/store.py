"""The database in which an alias keeps its leases: which one it is, and how it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from django.apps import apps
from django.db import connections, router

from ... import clock
from ...exceptions import InvalidLockBackend
from ..base import AliasOptions
from ..shared.databases import vendor_of
from .config import DatabaseOptions
from .connection import Connection, connect_as_django, settings_of
from .lease_file import FilePool, LeaseFile
from .lease_memory import MemoryPool, is_in_memory
from .mysql import MySQL
from .mysql_connection import MySQLConnection
from .pool import Pool, Urgency
from .postgresql import PostgreSQL
from .postgresql_connection import PostgreSQLConnection
from .sessions import SessionProof
from .sqlite import SQLite
from .statements import Dialect
from .wakeup import Wakeup

T = TypeVar("T")

DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": PostgreSQL,
    "sqlite": SQLite,
    "mysql": MySQL,
}


class Calls(Protocol):
    """A pool of either kind."""

    def run(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...

    def close_unused(self) -> None: ...


class Store:
    """One database.

    Attributes:
        made_for: The settings of the database. A test run changes them; then another store must
            be made.
        is_shared: Whether other processes see the leases.
        wakeup: Tells waiters about hand-overs; ``None`` if waiters poll.
        session: Proves deaths by the end of sessions; ``None`` unless configured.
    """

    def __init__(self, options: AliasOptions, own: DatabaseOptions) -> None:
        self.database = database_alias(options.alias, own.database)
        self.made_for = settings_of(self.database)
        # A little less, so that most calls end by the driver's own timeout before their deadline.
        timeout = 0.95 * options.command_timeout
        entry = connections.settings[self.database]
        self.vendor = vendor_of(entry["ENGINE"])
        self.dialect = DIALECTS[self.vendor]()
        self.is_shared = True
        self.wakeup: Wakeup | None = None
        self.session: SessionProof | None = None
        self.pool: Calls
        if self.vendor == "sqlite":
            if is_in_memory(entry["NAME"]):
                self.is_shared = False
                self.pool = _memory(self.made_for)
                return
            self.pool = FilePool(LeaseFile(entry["NAME"]), own.connections)
            return
        kind = PostgreSQLConnection if self.vendor == "postgresql" else MySQLConnection
        self.pool = pool = Pool(connect_as_django(self.database, timeout, kind), own.connections)
        if self.vendor == "postgresql":

            def ask(statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
                deadline = clock.now() + timeout
                # Not behind acquires: a void claim must be withdrawn in time.
                return pool.run(lambda one: one.rows(statement, values), deadline, "end")

            if own.proof:
                self.session = SessionProof(ask)
            self.wakeup = Wakeup(
                lambda: pool.connect(clock.now() + timeout).detach(),
                lambda *values: ask("SELECT pg_notify(%s, %s)", values),
                session=self.session,
            )

    @property
    def is_current(self) -> bool:
        return self.made_for == settings_of(self.database)

    def forget(self) -> None:
        """Leave all connections to the parent; called in a forked child."""
        self.pool.forget()
        if self.session is not None:
            self.session.forget()
        if self.wakeup is not None:
            self.wakeup.forget()

    def close(self) -> None:
        if self.wakeup is not None:
            self.wakeup.close()
        self.pool.close()


_memories: dict[object, MemoryPool] = {}
"""Leases in memory outlive the backends that use them, because tests may change settings."""


def _memory(made_for: object) -> MemoryPool:
    return _memories.setdefault(made_for, MemoryPool())


def database_alias(of: str, named: str | None) -> str:
    """The alias in ``DATABASES``: the named one, or that to which routers write the leases.

    Args:
        of: The alias in ``DLOCKS``.

    Raises:
        InvalidLockBackend: That alias is not defined, or our app is not installed.
    """
    if not apps.is_installed("django_dlock"):
        # Without the app, no system check of ours could tell.
        raise InvalidLockBackend(
            f"The locks of alias {of!r} are kept in a table of 'django_dlock': add it "
            "to INSTALLED_APPS, and run migrate"
        )
    # Imported here: this module is imported before the apps are loaded.
    from ...models import LeaseRecord

    alias: str = named or router.db_for_write(LeaseRecord)
    if alias not in connections.settings:
        raise InvalidLockBackend(
            f"The locks of alias {of!r} are to be kept in DATABASES[{alias!r}], which "
            f"is not defined; DATABASES defines {sorted(connections.settings)}"
        )
    return alias
