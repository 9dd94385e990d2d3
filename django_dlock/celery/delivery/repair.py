"""Repairs database connections after a body that may have been interrupted anywhere."""

from __future__ import annotations

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error, InterfaceError, OperationalError, connections

from ...log import logger
from .interrupt import LeaseAborted

__all__ = ["OUTAGES", "in_transaction", "repair"]

OUTAGES = (OperationalError, InterfaceError)
"""Errors of a database that is unreachable or that aborts a transaction, as in a deadlock."""


def in_transaction() -> frozenset[str]:
    """The aliases of this thread's connections that are in a transaction."""
    made = connections.all(initialized_only=True)
    return frozenset(connection.alias for connection in made if connection.in_atomic_block)


def repair(error: BaseException, before: frozenset[str], *, interrupted: bool) -> None:
    """Make this thread's connections usable again after a body that ended with ``error``.

    Args:
        before: Aliases that were in a transaction when the body began. They are the caller's
            and are left alone.
        interrupted: Whether the body was interrupted from outside.
    """
    # An exception raised between two bytecodes may leave a transaction open, or leave Django
    # wrong about it. Then the connection's state is unknown; that of a new one is known.
    broken = (
        interrupted
        or isinstance(error, SoftTimeLimitExceeded | LeaseAborted)
        or not isinstance(error, Exception)
    )
    for connection in connections.all(initialized_only=True):
        if connection.alias in before:
            continue
        try:
            if not broken:
                connection.close_if_unusable_or_obsolete()
                continue
            connection.close()
            if connection.in_atomic_block:
                # Only connecting resets Django's own flags for the transaction.
                connection.connect()
        except Error as trouble:
            logger.warning("Database %r cannot be reached: %s", connection.alias, trouble)
