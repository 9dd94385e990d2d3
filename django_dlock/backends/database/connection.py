"""Connections to the database that are django-dlock's own, never the caller's.

They are made as Django makes them for the alias, and then spoken to through the driver. Each
statement is a transaction of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Literal

from django.core import mail
from django.db import connections
from django.db.utils import load_backend

__all__ = ["Connection", "Failure", "Kind", "connect_as_django", "connect_failure", "settings_of"]

Kind = Literal["broken", "unreachable", "passing", "missing", "read-only", "denied", "refused"]
"""What an error of the driver means.

``broken``: the connection is of no use, and the statement may have been executed.
``unreachable``: no connection could be made. ``passing``: nothing was executed, and it may be
tried again. ``missing``: there is no such table or column. ``denied``: credentials or rights."""

POSTGRES: dict[str, Kind] = {
    "40001": "passing",
    "40P01": "passing",
    "55P03": "passing",
    "57014": "passing",
    "23505": "passing",
    "42P01": "missing",
    "42703": "missing",
    "3F000": "missing",
    "25006": "read-only",
    "42501": "denied",
}
MYSQL: dict[int, Kind] = {
    1047: "broken",
    1205: "passing",
    1213: "passing",
    1062: "passing",  # another caller inserted the name first
    1054: "missing",
    1146: "missing",
    1290: "read-only",
    1792: "read-only",
    1836: "read-only",
    1142: "denied",
    1143: "denied",
    1053: "broken",
    1317: "passing",
    1969: "passing",
    1927: "broken",
    3024: "passing",
    4031: "broken",
}


DENIED = ("authentication failed", "no password", "pg_hba.conf", "role ", 'database "')
"""In what PostgreSQL says where a connection is refused for good."""


class Failure(Exception):
    """An error of the driver, and what it means."""

    def __init__(self, kind: Kind, error: BaseException) -> None:
        super().__init__(str(error).strip() or type(error).__name__)
        self.kind = kind


class Connection:
    """One connection of the driver.

    Args:
        driver: Its module, which has the errors.
        mark: What stands for a parameter in a statement.

    Attributes:
        last_id: What the last statement set with ``LAST_INSERT_ID``, on MySQL.
    """

    def __init__(self, raw: Any, driver: Any, *, mark: str = "%s") -> None:
        self.raw, self._driver, self._mark, self._pid = raw, driver, mark, os.getpid()
        self._cursor = raw.cursor()
        self.last_id = 0

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute, and return all rows."""
        self._execute(statement, parameters)
        try:
            return list(self._cursor.fetchall())
        except self._driver.Error as error:
            raise failure(error) from error

    def count(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Execute, and return how many rows it concerned."""
        self._execute(statement, parameters)
        return int(self._cursor.rowcount)

    def _execute(self, statement: str, parameters: Sequence[Any]) -> None:
        if self._mark != "%s":
            statement = statement.replace("%s", self._mark)
        try:
            self._cursor.execute(statement, tuple(parameters))
        except self._driver.Error as error:
            raise failure(error) from error
        self.last_id = getattr(self._cursor, "lastrowid", None) or 0

    def cut(self) -> None:
        """Shut its socket down; runs on another thread than the call."""
        with (
            # Also what the driver raises of a connection that it has closed by now.
            contextlib.suppress(Exception),
            socket.socket(fileno=os.dup(self._fileno())) as ours,
        ):
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._pid != os.getpid():
            # Of another thread of the parent, which used it at the moment of the fork.
            self.leave_to_parent()
        raw, self.raw = self.raw, None
        if raw is not None:
            with contextlib.suppress(Exception):
                raw.close()

    # One that comes too late for its caller may be dropped by anybody.
    __del__ = close

    def detach(self) -> Any:
        """The driver's connection, which is its new owner's to close."""
        raw, self.raw = self.raw, None
        return raw

    def leave_to_parent(self) -> None:
        """In a forked child: never to be used, nor told to the server, nor to be finalized."""
        if self.raw is None:
            return
        # Some drivers say goodbye to the server when they are finalized, and would end the
        # parent's session; SQLite would drop files that the parent uses.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_RDWR)
            try:
                os.dup2(nowhere, self._fileno())
            finally:
                os.close(nowhere)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.detach()))

    def _fileno(self) -> int:
        raw = self.raw
        # PyMySQL has the method on its socket alone.
        number: int = raw.fileno() if hasattr(raw, "fileno") else raw._sock.fileno()
        return number


def failure(error: BaseException) -> Failure:
    """What an error of the driver means."""
    number = error.args[0] if error.args else None
    # Before the state: drivers of MySQL may have one, too, which says less.
    if isinstance(number, int):
        lost = number == 0 or 2000 <= number < 3000
        return Failure("broken" if lost else MYSQL.get(number, "refused"), error)
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(state, str):
        broken = state[:2] in ("08", "57") and state != "57014"
        return Failure("broken" if broken else POSTGRES.get(state, "refused"), error)
    return Failure(_of_text(str(error).lower(), type(error).__name__), error)


def _of_text(text: str, name: str) -> Kind:
    """SQLite's, and those of a server that is gone."""
    if "is locked" in text or "busy" in text:
        return "passing"
    if "no such" in text or "has no column" in text:
        return "missing"
    if "readonly" in text or "read-only" in text:
        return "read-only"
    if "disk" in text or "malformed" in text or "not a database" in text or "full" in text:
        return "refused"
    return "broken" if name in ("OperationalError", "InterfaceError") else "refused"


def connect_failure(error: BaseException) -> Failure:
    """What it means that no connection could be made."""
    text = str(error).lower()
    number = error.args[0] if error.args else None
    denied = number in (1044, 1045, 1049, 1698) or any(word in text for word in DENIED)
    return Failure("denied" if denied else "unreachable", error)


# -- as Django makes them ------------------------------------------------------------------


def settings_of(alias: str) -> tuple[Any, ...]:
    """What tells one database from another; changes when a test run takes its own."""
    entry = connections.settings[alias]
    return tuple(entry.get(key) for key in ("ENGINE", "NAME", "HOST", "PORT", "USER"))


def connect_as_django(alias: str, timeout: float) -> Callable[[], Connection]:
    """A function that makes a connection with the parameters of ``DATABASES[alias]``."""

    def connect() -> Connection:
        wrapper = _wrapper(alias, timeout)
        # Without the checks of ``ensure_connection``, which a test case may have forbidden for the
        # project's own connections.
        try:
            wrapper.connect()
            if wrapper.vendor == "postgresql" and _is_of_a_test_run(wrapper.settings_dict):
                # It ends with DROP DATABASE, which waits for five seconds for sessions to end.
                wrapper.connection.cursor().execute("SET idle_session_timeout = '2s'")
            return Connection(wrapper.connection, wrapper.Database)
        except BaseException:
            # It may have failed after the server had let it in.
            if wrapper.connection is not None:
                wrapper.connection.close()
            raise

    return connect


def _is_of_a_test_run(settings: dict[str, Any]) -> bool:
    name = str(settings["NAME"])
    test_name = (settings.get("TEST") or {}).get("NAME")
    # Django's runner and pytest-django both take the mails away.
    return hasattr(mail, "outbox") and (name == test_name or name.startswith("test_"))


def _wrapper(alias: str, timeout: float) -> Any:
    entry = connections.settings[alias]
    # No deep copy: an option may be an SSL context, for instance.
    options = dict(entry["OPTIONS"])
    settings = {**entry, "AUTOCOMMIT": True, "OPTIONS": options}
    # Of the project's own connections: ours are in no pool, and have no transactions.
    for option in ("pool", "isolation_level"):
        options.pop(option, None)
    wrapper = load_backend(settings["ENGINE"]).DatabaseWrapper(settings, alias)
    if wrapper.vendor in ("postgresql", "mysql"):
        # So that the thread of an attempt ends for which nobody waits any more.
        options.setdefault("connect_timeout", max(2, round(timeout)))
    return wrapper
