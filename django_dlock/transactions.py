"""Where a lock and a database transaction meet: the lock must outlive the transaction.

Django calls ``on_commit`` functions after a commit and silently drops them at a rollback. A
lock has to be released after either, so the hook is an object whose being dropped is noticed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["any_open", "is_open", "made", "open_since", "outermost", "run_after"]


def made() -> Sequence[BaseDatabaseWrapper]:
    """The connections that this thread, or the running coroutine, has made so far.

    As ``connections.all(initialized_only=True)``, which takes 3 µs for every database that is
    configured, used or not, and stands in the path of every acquire.
    """
    storage: Any = connections._connections  # type: ignore[attr-defined]
    mine = getattr(storage, "_storage", None)
    if isinstance(mine, threading.local) and asyncio._get_running_loop() is None:
        # How asgiref keeps them for threads.
        by_alias = vars(mine)
        return [by_alias[alias] for alias in connections.settings if alias in by_alias]
    return connections.all(initialized_only=True)


def _in_atomic() -> list[tuple[BaseDatabaseWrapper, object]]:
    """The connections in a transaction of this thread, and their outermost blocks."""
    found: list[tuple[BaseDatabaseWrapper, object]] = []
    for connection in made():
        for block in connection.atomic_blocks:
            # ``TestCase`` runs every test in a transaction that never ends while the test
            # looks; like Django's ``durable``, we behave as if it were not there.
            if not getattr(block, "_from_testcase", False):
                found.append((connection, block))
                break
    return found


def is_open(using: str) -> bool:
    """Whether this thread is in a transaction on the database, of Django's or by hand."""
    connection = connections[using]
    if connection.in_atomic_block:
        return any(found is connection for found, _ in _in_atomic())
    return not connection.get_autocommit()


def any_open() -> bool:
    """Whether this thread is in a transaction on any database, of Django's or by hand."""
    return any(
        is_open(connection.alias)
        for connection in made()
        # One that is not connected is in none, and asking it would connect.
        if connection.connection is not None
    )


def outermost() -> tuple[object, ...]:
    """The outermost ``atomic`` blocks that this thread is in, one per database."""
    found = _in_atomic()
    return tuple(block for _, block in found) if found else ()


def open_since(blocks: tuple[object, ...]) -> str | None:
    """The database of the first of these blocks that is still open, or ``None``."""
    if not blocks:
        # The usual case, on everybody's path.
        return None
    for connection, outer in _in_atomic():
        if any(outer is block for block in blocks):
            return connection.alias
    return None


def run_after(function: Callable[[], object]) -> bool:
    """Run ``function`` once, after this thread's transactions ended, however they end.

    Returns:
        False where no transaction is open: nothing was arranged.
    """
    for connection, _ in _in_atomic():
        _Hook(connection, function).arrange()
        return True
    return False


class _Hook:
    """Runs when called by a commit or when dropped by a rollback."""

    def __init__(self, connection: BaseDatabaseWrapper, function: Callable[[], object]) -> None:
        self.connection = connection
        self.function: Callable[[], object] | None = function

    def arrange(self) -> None:
        transaction.on_commit(self, using=self.connection.alias, robust=True)

    def __call__(self) -> None:
        function, self.function = self.function, None
        # Another database's transaction may still be open.
        if function is not None and not run_after(function):
            function()

    def __del__(self) -> None:
        function, self.function = self.function, None
        if function is None:
            return
        if not run_after(function):
            # Only a savepoint was rolled back otherwise, and the new hook waits on.
            function()
