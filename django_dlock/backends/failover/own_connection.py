"""A connection to a database that belongs to one thread: for the row, and for counting records.

It is neither the caller's, so a transaction of the caller changes nothing, nor does it wait for
ever: connecting has a time-out, and statements have a deadline. After a time without a network, a
connection that is only waited for would be answered as late as the time-outs of TCP have grown, and
a new one at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from django.db import connections

from ... import clock, process
from ..database.connection import wrapper_of
from ..database.deadlines import deadlines
from ..database.socket_handle import SocketHandle, handle_of

CONNECT_TIMEOUT = 2.0


class OwnConnection:
    """What ``connections[database]`` is on the thread that uses this.

    Args:
        database: Returns the alias in ``DATABASES``.
        timeout: Seconds to connect; with MySQL, also for each statement, if its deadline is later.
    """

    def __init__(self, database: Callable[[], str], timeout: float = CONNECT_TIMEOUT) -> None:
        self._database, self._timeout = database, timeout
        self._handle: SocketHandle | None = None
        self._wrapper: Any = None

    @contextlib.contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Connect if necessary; this and statements in the block fail at the deadline."""
        connected = False
        # Before it connects, because Django sends a new connection statements of its own.
        deadlines.begin(self, deadline)
        try:
            self._connect()
            connected = True
            yield
        finally:
            if not deadlines.end(self) or not connected:
                self.close()

    def _connect(self) -> None:
        database = self._database()
        wrapper = connections[database]
        if wrapper.connection is None:
            self._close_handle()
            connections[database] = self._wrapper = wrapper = wrapper_of(database, self._timeout)
            with process.connecting():
                wrapper.ensure_connection()
            if wrapper.vendor != "sqlite":
                self._handle = handle_of(wrapper.connection, wrapper.Database)

    def cut(self) -> None:
        """Make the running statement fail; called from another thread."""
        if (handle := self._handle) is not None:
            handle.shut_down()
        elif (wrapper := self._wrapper) is not None and wrapper.vendor == "postgresql":
            # It is still being set up. Drivers of MySQL have a time-out for each statement.
            raw = wrapper.connection
            if raw is not None and (handle := handle_of(raw, wrapper.Database)) is not None:
                handle.shut_down()
                handle.close()

    def close(self) -> None:
        # It may be broken, or its alias may no longer be defined.
        with contextlib.suppress(Exception):
            connections[self._database()].close()
        self._close_handle()

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def on_own_connection(call: Callable[[], object], database: str, patience: float) -> None:
    """Call it on a thread, and so on a connection to the database that no transaction uses.

    Raises:
        TimeoutError: It takes longer than ``patience`` seconds; then its statements fail.
    """
    errors, done = list[BaseException](), threading.Event()
    deadline = clock.now() + patience

    def run() -> None:
        own = OwnConnection(lambda: database)
        try:
            with own.until(deadline):
                call()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)
        finally:
            own.close()
            done.set()
            # After the answer, because this waits for a fork.
            process.thread_ends()

    threading.Thread(target=run, name="dlock-failover", daemon=True).start()
    if not done.wait(patience):
        raise TimeoutError(f"The database {database!r} did not answer within {patience:g} s")
    if errors:
        raise errors[0]
