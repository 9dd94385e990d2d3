"""Where a lock and a database transaction meet: the lock must outlive the transaction.

Django calls ``on_commit`` functions after a commit and silently drops them at a rollback. A
lock has to be released after either, so the hook is an object that notices when it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper


def _in_atomic() -> list[tuple[BaseDatabaseWrapper, object]]:
    """The connections in a transaction of this thread, and their outermost blocks."""
    found: list[tuple[BaseDatabaseWrapper, object]] = []
    for connection in connections.all(initialized_only=True):
        if connection.closed_in_transaction:
            # The database has rolled it back.
            continue
        for block in connection.atomic_blocks:
            # ``TestCase`` runs every test in a transaction that ends only after the test. Like
            # Django's ``durable``, we behave as if it were not there.
            if not getattr(block, "_from_testcase", False):
                found.append((connection, block))
                break
    return found


def is_open(using: str) -> bool:
    """Whether this thread is in a transaction on the database, begun by Django or by hand."""
    connection = connections[using]
    if connection.in_atomic_block:
        return any(found is connection for found, _ in _in_atomic())
    return not connection.get_autocommit()


def any_open() -> bool:
    """Whether this thread is in a transaction on any database, begun by Django or by hand."""
    return any(
        is_open(connection.alias)
        for connection in connections.all(initialized_only=True)
        # One that is not connected is in none, and asking it would connect.
        if connection.connection is not None
    )


def manual() -> str | None:
    """A database on which this thread is in manual transaction management, or ``None``.

    Nobody knows there when a transaction ends, so that Django refuses ``on_commit`` as well.
    """
    for connection in connections.all(initialized_only=True):
        # One that is not connected is in no transaction.
        connected = connection.connection is not None
        if connected and not connection.in_atomic_block and not connection.autocommit:
            return connection.alias
    return None


def refuse_manual() -> None:
    """Refuse to wait for the end of a transaction that nobody announces.

    Raises:
        TransactionManagementError: This thread is in manual transaction management.
    """
    if (database := manual()) is not None:
        raise transaction.TransactionManagementError(
            "hold_until='commit' cannot be used in manual transaction management, after "
            f"set_autocommit(False) on database {database!r}: use atomic(), or release the lock "
            "yourself after the commit"
        )


def outermost() -> tuple[object, ...]:
    """The outermost ``atomic`` blocks that this thread is in, one per database."""
    return tuple(block for _, block in _in_atomic())


def open_since(blocks: tuple[object, ...]) -> str | None:
    """The database of the first of these blocks that is still open, or ``None``."""
    if not blocks:
        # The usual case, and every release passes here.
        return None
    for connection, outer in _in_atomic():
        if any(outer is block for block in blocks):
            return connection.alias
    return None


def run_after(function: Callable[[], object]) -> AfterTransactions | None:
    """Run ``function`` once, after this thread's transactions ended, however they end.

    Returns:
        What runs it, to be kept only as a weak reference. ``None`` if no transaction is open; then
        ``function`` is not run.
    """
    late = AfterTransactions(function)
    return late if late.register() else None


class AfterTransactions:
    """A function that runs once, when no transaction of the thread is open any more."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self._waits_for: list[tuple[BaseDatabaseWrapper, object]] = []

    def register(self) -> bool:
        """Run after the transactions that are open; ``False`` if none is."""
        self._waits_for = found = _in_atomic()
        if found:
            # After this one, look for others again.
            transaction.on_commit(_Hook(self).run, using=found[0][0].alias, robust=True)
        return bool(found)

    def is_overdue(self) -> bool:
        """Whether the transactions have ended without a word; may be asked on any thread.

        After a function of ``on_commit`` has raised, Django calls no other, and the error may keep
        them alive. After ``close()``, it calls them with the next query at the earliest.
        """
        waits_for = self._waits_for
        return bool(self._function and waits_for) and all(
            _has_ended(connection, block) for connection, block in waits_for
        )

    def run(self) -> None:
        """Run it now, or after the transaction that is open, if there is one."""
        if self._function is None or self.register():
            return
        # In one step, because the hook may be garbage-collected in another thread meanwhile.
        function, self._function = self._function, None
        if function is not None:
            function()


def _has_ended(connection: BaseDatabaseWrapper, block: object) -> bool:
    """Whether a transaction of any thread is over."""
    if connection.connection is None or connection.closed_in_transaction:
        return True
    if any(open_one is block for open_one in connection.atomic_blocks.copy()):
        return False
    # Django forgets the block before it commits, and turns autocommit on after that.
    return bool(connection.atomic_blocks or connection.autocommit)


class _Hook:
    """Runs when called by a commit or when dropped by a rollback."""

    def __init__(self, late: AfterTransactions) -> None:
        self.late: AfterTransactions | None = late

    def run(self) -> None:
        late, self.late = self.late, None
        # Another database's transaction may still be open, or only a savepoint was rolled back;
        # then a new hook waits for the end of that transaction.
        if late is not None:
            late.run()

    def __del__(self) -> None:
        self.run()
