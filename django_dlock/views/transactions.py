"""The transactions that a guarded view opens in place of Django."""

from __future__ import annotations

from django.db import connections

__all__ = ["OwnTransactions"]


class OwnTransactions(set[str]):
    """The databases that ``non_atomic_requests`` named; claims to contain every database.

    Django opens a transaction for each database that is not in this set. That transaction would
    begin before the lock and end after the release, so the locked view opens it instead.
    """

    def __contains__(self, database: object) -> bool:
        return True

    def databases(self) -> list[str]:
        """The databases with ``ATOMIC_REQUESTS``, without those in ``non_atomic_requests``."""
        marked = set(self)
        return [
            database
            for database, settings in connections.settings.items()
            if settings["ATOMIC_REQUESTS"] and database not in marked
        ]
