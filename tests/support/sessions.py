"""Database sessions that end while a run uses them, and databases that do not write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import connections

from tests.support.databases import until

THIS = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
END = {"postgresql": "SELECT pg_terminate_backend(%s)", "mysql": "KILL %s"}
IS_THERE = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE pid = %s",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE id = %s",
}


def ask(using: str, sql: str, *parameters: object) -> object:
    """The first value of the first row, if there is one."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, parameters)
        row = cursor.fetchone() if cursor.description else None
    return row and row[0]


def end_session(using: str, over: str) -> None:
    """End this thread's session of ``using``, unseen by it.

    Args:
        over: An alias of the same server, whose user may do so.
    """
    vendor = connections[using].vendor
    if vendor == "sqlite":
        connections[using].connection.close()
        return
    session = ask(using, THIS[vendor])
    ask(over, END[vendor], session)
    gone_from_server(over, session)


def gone_from_server(over: str, session: object) -> None:
    vendor = connections[over].vendor
    until(lambda: not ask(over, IS_THERE[vendor], session))


@contextmanager
def without_table(using: str, table: str) -> Iterator[None]:
    """As if nobody had migrated: the table has another name meanwhile."""
    away = f"{table}_away"
    rename = "ALTER TABLE {} RENAME TO {}"
    ask(using, rename.format(table, away))
    try:
        yield
    finally:
        ask(using, rename.format(away, table))


@contextmanager
def read_only(using: str, over: str) -> Iterator[Callable[[], None]]:
    """A database that can be made read-only, also for sessions that are open, by a call.

    On PostgreSQL, a transaction that is open stays as it is.
    """
    vendor = connections[using].vendor

    def begin() -> None:
        if vendor == "sqlite":
            ask(using, "PRAGMA query_only = ON")
        elif vendor == "mysql":
            ask(over, "SET GLOBAL read_only = 1")
        else:
            ask(over, "ALTER SYSTEM SET default_transaction_read_only = on")
            ask(over, "SELECT pg_reload_conf()")
            until(lambda: ask(using, "SHOW default_transaction_read_only") == "on")

    try:
        yield begin
    finally:
        if vendor == "sqlite":
            ask(using, "PRAGMA query_only = OFF")
        elif vendor == "mysql":
            ask(over, "SET GLOBAL read_only = 0")
        else:
            ask(over, "ALTER SYSTEM RESET default_transaction_read_only")
            ask(over, "SELECT pg_reload_conf()")
            until(lambda: ask(using, "SHOW default_transaction_read_only") == "off")
