"""The database in which an alias keeps its leases: which one it is, and how it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from django.apps import apps
from django.conf import settings
from django.db import connections, router
from django.db.utils import load_backend

from ... import clock
from ...exceptions import InvalidLockBackend
from ...redaction import redacted
from ..base import AliasOptions, Problem
from .connection import Connection, connect_as_django, settings_of
from .lease_file import FilePool, LeaseFile
from .lease_memory import MemoryPool, is_in_memory
from .mysql import MySQL
from .mysql_connection import MySQLConnection
from .pool import FEWEST, Pool, Urgency
from .postgresql import PostgreSQL
from .postgresql_connection import PostgreSQLConnection
from .sessions import SessionProof
from .sqlite import SQLite
from .statements import Dialect
from .wakeup import Wakeup

__all__ = ["CONNECTIONS", "POLL_INTERVAL", "Calls", "Store", "database_alias", "problems"]

T = TypeVar("T")

CONNECTIONS = 4
POLL_INTERVAL = 0.5
OPTIONS = ("connections", "database", "poll_interval", "proof")
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

    def __init__(self, options: AliasOptions) -> None:
        self.database = database_alias(options)
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
        limit = options.options.get("connections", CONNECTIONS)
        if self.vendor == "sqlite":
            if is_in_memory(entry["NAME"]):
                self.is_shared = False
                self.pool = _memory(self.made_for)
                return
            self.pool = FilePool(LeaseFile(entry["NAME"]), limit)
            return
        kind = PostgreSQLConnection if self.vendor == "postgresql" else MySQLConnection
        self.pool = pool = Pool(connect_as_django(self.database, timeout, kind), limit)
        if self.vendor == "postgresql":

            def ask(statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
                deadline = clock.now() + timeout
                # Not behind acquires: a void claim must be withdrawn in time.
                return pool.run(lambda one: one.rows(statement, values), deadline, "end")

            if options.options.get("proof"):
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


def vendor_of(engine: str) -> str:
    vendor: str = load_backend(engine).DatabaseWrapper.vendor
    return vendor


def database_alias(options: AliasOptions) -> str:
    """The alias in ``DATABASES``: ``OPTIONS["database"]``, or where routers write the leases.

    Raises:
        InvalidLockBackend: That alias is not defined, or our app is not installed.
    """
    if not apps.is_installed("django_dlock"):
        # Without the app, no system check of ours could tell.
        raise InvalidLockBackend(
            f"The locks of alias {options.alias!r} are kept in a table of 'django_dlock': add it "
            "to INSTALLED_APPS, and run migrate"
        )
    # Imported here: this module is imported before the apps are loaded.
    from ...models import LeaseRecord

    named: Any = options.options.get("database")
    alias: str = named or router.db_for_write(LeaseRecord)
    if alias not in connections.settings:
        raise InvalidLockBackend(
            f"The locks of alias {options.alias!r} are to be kept in DATABASES[{alias!r}], which "
            f"is not defined; DATABASES defines {sorted(connections.settings)}"
        )
    return alias


# -- settings --------------------------------------------------------------------------------


def problems(options: AliasOptions) -> list[Problem]:
    """What is wrong with the settings of an alias, as far as this shows without a server."""
    where, given = f"DLOCKS[{options.alias!r}]", options.options
    found: list[Problem] = []
    if options.cache is not None or options.location is not None:
        message = f"{where} has 'CACHE' or 'LOCATION', but keeps its locks in a database."
        hint = "Leave them out; OPTIONS['database'] names an alias of DATABASES."
        found.append(Problem("E006", message, hint))
    if unknown := sorted(set(given).difference(OPTIONS)):
        message = f"{where}['OPTIONS'] has {redacted(unknown)}."
        hint = f"This backend takes {[*OPTIONS, 'command_timeout', 'outage_patience']}."
        found.append(Problem("E008", message, hint))
    found += _wrong_values(where, given)
    databases, named = settings.DATABASES, given.get("database", "default")
    entry = databases.get(named) if isinstance(named, str) else None
    engine = (entry or {}).get("ENGINE") or ""
    if not engine or engine == "django.db.backends.dummy":
        where = f"{where}['OPTIONS']['database']" if "database" in given else where
        message = f"{where} keeps its locks in DATABASES[{redacted(named)}], which is not defined."
        hint = f"DATABASES defines {sorted(databases)}. Define it, or use Redis in DLOCKS."
        if "database" not in given and databases:
            # Routers may choose another database.
            return found
        found.append(Problem("E006", message, hint))
        return found
    try:
        vendor = vendor_of(engine)
    except Exception as error:  # noqa: BLE001 - Django reports it at first use
        message = f"{where}: the engine {engine!r} of DATABASES[{named!r}] cannot be used: {error}"
        found.append(Problem("E006", message, "Install its driver, or name another database."))
        return found
    if vendor not in DIALECTS:
        message = f"{where} keeps its locks in DATABASES[{named!r}], whose engine is {vendor!r}."
        hint = f"Supported are {sorted(DIALECTS)}; name one in OPTIONS['database'], or use Redis."
        found.append(Problem("E006", message, hint))
    elif given.get("proof") is True and vendor != "postgresql":
        option = f"{where}['OPTIONS']['proof']"
        message = f"{option} is True, but DATABASES[{named!r}] is {vendor!r}."
        hint = "Only PostgreSQL supports this option; remove it."
        found.append(Problem("E008", message, hint))
    return found


def _wrong_values(where: str, given: Any) -> list[Problem]:
    found: list[Problem] = []
    count, pause = given.get("connections", CONNECTIONS), given.get("poll_interval", POLL_INTERVAL)
    if isinstance(count, bool) or not isinstance(count, int) or count < FEWEST:
        message = f"{where}['OPTIONS']['connections'] is {redacted(count)}."
        found.append(Problem("E008", message, f"It takes a whole number, {FEWEST} or more."))
    if isinstance(pause, bool) or not isinstance(pause, int | float) or not 0.01 <= pause <= 10:
        message = f"{where}['OPTIONS']['poll_interval'] is {redacted(pause)}."
        found.append(Problem("E008", message, "It takes seconds, 0.01 to 10."))
    if not isinstance(given.get("proof", False), bool):
        message = f"{where}['OPTIONS']['proof'] is {redacted(given['proof'])}."
        found.append(Problem("E008", message, "It takes True or False."))
    return found
