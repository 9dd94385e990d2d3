"""Leases in memory, for a project whose SQLite database is in memory, as in most test runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from ..shared.pool import NoSlot
from ..slots import Slots
from . import sqlite
from .connection import Connection
from .pool import Urgency

T = TypeVar("T")


def is_in_memory(name: object) -> bool:
    """Whether ``DATABASES[…]['NAME']`` means a database in memory."""
    text = str(name)
    return (
        not text or text == ":memory:" or "mode=memory" in text or text.startswith("file::memory:")
    )


class MemoryPool:
    """One connection to a database in memory, for all threads; used like ``Pool``."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the leases in a forked child: they belong to the parent process."""
        # A slot is returned even if an interrupt drops it.
        self._slots = Slots(1)
        self._connection: Connection | None = None

    def close(self) -> None:
        """Do nothing: closing would delete the leases."""

    def close_unused(self) -> None:
        """Do nothing, as ``close``."""

    def run(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T:
        slot = self._slots.take(0, deadline)
        if slot is None:
            # Memory always answers.
            raise NoSlot(is_busy=True)
        try:
            return use(self._connected())
        finally:
            slot.release()

    def _connected(self) -> Connection:
        connection = self._connection
        if connection is None:
            connection = Connection(sqlite.open_database("file::memory:"), sqlite3, mark="?")
            sqlite.create_tables(connection.raw, durable=False)
            self._connection = connection
        elif connection.raw.in_transaction:
            # An interrupt may have left it open.
            connection.raw.rollback()
        return connection
