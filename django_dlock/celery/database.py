"""The state of database connections around a body that may end anywhere."""

from __future__ import annotations

import logging

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error, InterfaceError, OperationalError

from ..transactions import made
from .abort import LeaseAborted

__all__ = ["OUTAGES", "in_transaction", "mend"]

logger = logging.getLogger("django_dlock")

OUTAGES = (OperationalError, InterfaceError)
"""What a database that is away, or chose this transaction to die, raises."""


def in_transaction() -> frozenset[str]:
    """The aliases of this thread's connections that are in a transaction."""
    return frozenset(connection.alias for connection in made() if connection.in_atomic_block)


def mend(error: BaseException, before: frozenset[str], *, struck: bool) -> None:
    """Make this thread's connections usable again after a body that ended with ``error``.

    Args:
        before: What was in a transaction when the body began: the caller's, not touched.
        struck: The body was interrupted from outside.
    """
    # An exception that strikes between two bytecodes may leave a transaction open, or Django's
    # idea of it wrong. What the connection was told is then not known; a new one is.
    broken = (
        struck
        or isinstance(error, SoftTimeLimitExceeded | LeaseAborted)
        or not isinstance(error, Exception)
    )
    for connection in made():
        if connection.alias in before:
            continue
        try:
            if not broken:
                connection.close_if_unusable_or_obsolete()
                continue
            connection.close()
            if connection.in_atomic_block:
                # Only connecting resets what Django believes of the transaction.
                connection.connect()
        except Error as trouble:
            logger.warning("Database %r cannot be reached: %s", connection.alias, trouble)
