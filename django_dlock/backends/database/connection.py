"""Connections to the database that belong to django-dlock, never to the caller.

Django makes them with the settings of the alias; after that only the driver is used. Each
statement is a transaction of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from django.core import mail
from django.db import connections
from django.db.utils import load_backend

from ...databases.errors import Kind, kind_of
from .prepared import Prepared
from .socket_handle import SocketHandle, handle_of

DENIED = ("authentication failed", "no password", "pg_hba.conf", "role ", 'database "')
"""Parts of PostgreSQL's messages for a connection that it refuses permanently."""
CROWDED = "too many connections"
"""Part of its messages for a refusal that ends soon, although they name a role or a database."""


OBSTACLES = {
    1665: "its binlog_format is STATEMENT, with which InnoDB cannot write at READ COMMITTED; "
    "set binlog_format to MIXED or ROW",
}
"""What MySQL refuses for its own settings, by number."""


class Failure(Exception):
    """An error of the driver, and what it means.

    Attributes:
        obstacle: What is in the way, and the cure; empty if only the driver's words are known.
    """

    def __init__(self, kind: Kind, error: BaseException, obstacle: str = "") -> None:
        # PostgreSQL quotes the statement after a line break, which tells an operator nothing.
        words = str(error).partition("\nLINE ")[0].split()
        super().__init__(" ".join(words) or type(error).__name__)
        self.kind, self.obstacle = kind, obstacle


class Connection:
    """One connection of the driver.

    Args:
        driver: The driver's module, which defines its errors.
        mark: The placeholder of a parameter in a statement.
        handle: Of its socket; ``None`` if there is none.

    Attributes:
        deadline: Of the present call, on ``clock.now()``.
        heard_at: When its last call was answered; kept by the pool.
        is_reusable: Whether the last call ended without being cut.
        last_id: On MySQL, the value that the last statement set with ``LAST_INSERT_ID``.
    """

    def __init__(
        self, raw: Any, driver: Any, *, mark: str = "%s", handle: SocketHandle | None = None
    ) -> None:
        self._handle = handle
        self.raw, self._driver, self._mark, self._pid = raw, driver, mark, os.getpid()
        self._cursor = raw.cursor()
        self.deadline = self.heard_at = 0.0
        self.last_id, self.is_reusable = 0, True

    @classmethod
    def of(cls, wrapper: Any, timeout: float) -> Connection:
        """The connection of a ``DatabaseWrapper`` of Django.

        Args:
            timeout: Seconds that a call may usually take.
        """
        raw, driver = wrapper.connection, wrapper.Database
        return cls(raw, driver, handle=handle_of(raw, driver))

    @property
    def server(self) -> str:
        """The version of a MySQL server, which names MariaDB if it is one."""
        return str(self.raw.get_server_info())

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a statement and return all rows."""
        self._execute(statement, parameters)
        try:
            return list(self._cursor.fetchall())
        except self._driver.Error as error:
            raise failure(error) from error

    def count(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Execute a statement and return the number of rows it matched."""
        self._execute(statement, parameters)
        return int(self._cursor.rowcount)

    def prepared(self, statement: Prepared, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """As ``rows``, with a statement that the session keeps; only on PostgreSQL."""
        raise NotImplementedError

    def _execute(self, statement: str, parameters: Sequence[Any]) -> None:
        if self._mark != "%s":
            statement = statement.replace("%s", self._mark)
        try:
            self._cursor.execute(statement, tuple(parameters))
        except self._driver.Error as error:
            raise failure(error) from error
        self.last_id = getattr(self._cursor, "lastrowid", None) or 0

    def keep_alive(self, timeout: float) -> None:
        """Have the system notice a connection that is dead; see ``keepalive``."""
        if self._handle is not None:
            self._handle.keep_alive(timeout)

    def cut(self) -> None:
        """Shut the socket down; called from another thread than the one that uses it."""
        # One reading: the thread that uses it may close it meanwhile.
        if (handle := self._handle) is not None:
            handle.shut_down()

    def close(self) -> None:
        if self._pid != os.getpid():
            # In a forked child: another thread of the parent used it at the moment of the fork.
            self.leave_to_parent()
        raw, self.raw = self.raw, None
        if raw is not None:
            with contextlib.suppress(Exception):
                raw.close()
        self._close_handle()

    # The caller may have stopped waiting before the connection is made; then nobody closes it.
    __del__ = close

    def detach(self) -> Any:
        """The driver's connection; the caller must close it."""
        raw, self.raw = self.raw, None
        self._close_handle()
        return raw

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def leave_to_parent(self) -> None:
        """In a forked child: do not use it, send nothing on it and keep it from being finalized."""
        if self.raw is None:
            return
        # Some drivers send the server a goodbye when they are finalized, which would end the
        # parent's session; SQLite would delete files that the parent uses.
        if self._handle is not None:
            self._handle.leave_to_parent()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.detach()))


def failure(error: BaseException) -> Failure:
    """What an error of the driver means."""
    number = error.args[0] if error.args else None
    obstacle = OBSTACLES.get(number, "") if isinstance(number, int) else ""
    return Failure(kind_of(error), error, obstacle)


def connect_failure(error: BaseException) -> Failure:
    """What an error while connecting means."""
    text = str(error).lower()
    number = error.args[0] if error.args else None
    denied = number in (1044, 1045, 1049, 1698) or (
        CROWDED not in text and any(word in text for word in DENIED)
    )
    return Failure("denied" if denied else "unreachable", error)


# -- connections with Django's settings ------------------------------------------------


def settings_of(alias: str) -> tuple[Any, ...]:
    """Identifies a database; changes when a test run switches to its test database."""
    entry = connections.settings[alias]
    return tuple(entry.get(key) for key in ("ENGINE", "NAME", "HOST", "PORT", "USER"))


def connect_as_django(
    alias: str, timeout: float, kind: type[Connection] = Connection
) -> Callable[[], Connection]:
    """Return a function that connects with the parameters of ``DATABASES[alias]``."""

    def connect() -> Connection:
        wrapper = wrapper_of(alias, timeout)
        # Without the checks of ``ensure_connection``: a test case may have forbidden them for the
        # project's own connections.
        try:
            wrapper.connect()
            if wrapper.vendor == "postgresql" and _is_of_a_test_run(wrapper.settings_dict):
                # The run ends with DROP DATABASE, which waits five seconds for sessions to end.
                wrapper.connection.cursor().execute("SET idle_session_timeout = '2s'")
            made = kind.of(wrapper, timeout)
            made.keep_alive(timeout)
            return made
        except BaseException:
            # The error may have come after the server accepted the connection.
            if wrapper.connection is not None:
                wrapper.connection.close()
            raise

    return connect


def _is_of_a_test_run(settings: dict[str, Any]) -> bool:
    name = str(settings["NAME"])
    test_name = (settings.get("TEST") or {}).get("NAME")
    # Both Django's runner and pytest-django replace the e-mail backend.
    return hasattr(mail, "outbox") and (name == test_name or name.startswith("test_"))


def wrapper_of(alias: str, timeout: float) -> Any:
    """A ``DatabaseWrapper`` of our own, with the settings of the alias; not connected."""
    entry = connections.settings[alias]
    # Not a deep copy: an option may be an SSL context, for instance.
    options = dict(entry["OPTIONS"])
    settings = {**entry, "AUTOCOMMIT": True, "OPTIONS": options}
    # Settings of the project's connections only: ours use no pool and no transactions.
    for option in ("pool", "isolation_level"):
        options.pop(option, None)
    wrapper = load_backend(settings["ENGINE"]).DatabaseWrapper(settings, alias)
    if wrapper.vendor in ("postgresql", "mysql"):
        # With a timeout, an attempt that nobody waits for any more ends its thread.
        options.setdefault("connect_timeout", max(2, round(timeout)))
    if wrapper.Database.__name__ in ("MySQLdb", "pymysql"):
        # If nothing else ends a call; whole seconds, and later than its deadline.
        for option in ("read_timeout", "write_timeout"):
            options.setdefault(option, math.ceil(timeout) + 1)
    return wrapper
