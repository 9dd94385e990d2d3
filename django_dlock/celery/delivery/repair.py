"""Repairs database connections after a body that may have been interrupted anywhere."""

from __future__ import annotations

from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error, connections
from django.db.transaction import TransactionManagementError

from ...databases import errors as database_errors
from ...log import logger
from .interrupt import LeaseAborted


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


class UsedConnection:
    """The connection with which a run begins: whether the run has lost it, or met an error on it.

    Args:
        using: Of the record's database.
    """

    def __init__(self, using: str) -> None:
        self._using, self._begun_with = using, connections[using].connection
        self._met_error = False
        self.is_lost = False
        """Whether it was closed, or broke."""

    def note_error(self) -> None:
        """Remember whether there was an error; call this before a rollback, which forgets it."""
        self._met_error = bool(connections[self._using].errors_occurred)

    def look(self) -> None:
        """Find out whether it is lost; call this before ``repair``, which may close it."""
        now = connections[self._using]
        # At the end of ``atomic``, Django replaces a connection that it cannot roll back.
        self.is_lost = now.connection is not self._begun_with or (
            now.errors_occurred and not now.in_atomic_block and not now.is_usable()
        )

    def failed_with(self, error: Error) -> bool:
        """Whether a body ended with this error because of its server, or of its connection.

        A body may use other databases, whose errors are its own.
        """
        if self.broke(error):
            return True
        broken = database_errors.kind_of(error) == "broken"
        return database_errors.is_outage(error) and self._met_error and not broken

    def broke(self, error: Error) -> bool:
        """Whether this error is due to a connection that was lost."""
        # Some drivers do not notice that it is closed before Django refuses the statement.
        of_it = (
            isinstance(error, TransactionManagementError)
            or database_errors.is_outage(error)
            # A body may also close its connection, and meet a deadlock on the next one.
            or database_errors.kind_of(error) == "broken"
        )
        return self.is_lost and of_it
