"""The transactions of a guarded view, and the release of a lock that waits for the end of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from django.db import connections
from django.http import HttpRequest

from ..lock import Lock
from .wrapped import unwrapped


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


def release_when_closed(request: HttpRequest, lock: Lock) -> None:
    """Release with the request, at the latest, a lock that waits for the end of a transaction.

    After a function of ``on_commit`` has raised, Django calls no other, and in a ``TestCase`` it
    calls none.
    """
    late_release = getattr(lock, "_late_release", lambda: None)

    def release() -> None:
        if late := late_release():
            late.run()

    if late_release():
        call_when_closed(request, release)


def call_when_closed(request: HttpRequest, function: Callable[[], object]) -> None:
    """Call a function when the server has done with the request."""
    whole = unwrapped(request)
    closing = ExitStack()
    closing.callback(whole.close)
    closing.callback(function)
    whole.close = closing.close
