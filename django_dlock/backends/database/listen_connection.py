"""One connection to PostgreSQL that listens for notifications, through psycopg 3 or psycopg 2."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

_ABANDONED: list[Any] = []
"""The parent's connections in a forked child; finalizing one would end the parent's session."""


class Stopped(Exception):
    """The alarm was set."""


class Alarm:
    """Tells a thread to stop while it waits for notifications."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def set(self) -> None:
        # OSError: it is closed already, or its buffer is full because it was set so often.
        with contextlib.suppress(OSError):
            self._write.send(b"!")

    def close(self) -> None:
        self._read.close()
        self._write.close()


class ListeningConnection:
    """Listens on one channel.

    Args:
        open_connection: Returns a connection of psycopg 3 or psycopg 2 in autocommit mode, which
            ``close`` closes.
        alarm: Ends ``read``.
    """

    def __init__(self, open_connection: Callable[[], Any], channel: str, alarm: Alarm) -> None:
        self._alarm, self._connection = alarm, cast(Any, None)
        self._selector = selectors.DefaultSelector()
        try:
            self._connection = open_connection()
            self.execute(f'LISTEN "{channel}"')
            self._selector.register(self._connection.fileno(), selectors.EVENT_READ)
            self._selector.register(alarm, selectors.EVENT_READ)
        except BaseException:
            self.close()
            raise

    def execute(self, statement: str, values: Sequence[Any] = ()) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, values)

    def read(self, timeout: float) -> list[str]:
        """The payloads received; waits for one for at most ``timeout`` seconds.

        Raises:
            Stopped: The alarm was set.
            psycopg.Error: The connection is cut.
        """
        # A notification that arrived with an earlier reply does not make the socket readable again.
        if received := self._received():
            return received
        ready = self._selector.select(timeout)
        if any(key.fileobj is self._alarm for key, _ in ready):
            raise Stopped
        return self._received()

    def _received(self) -> list[str]:
        if (session := getattr(self._connection, "pgconn", None)) is not None:
            session.consume_input()
            # A stranger's may have letters, in whatever encoding the connection has.
            received = iter(session.notifies, None)
            return [found.extra.decode("utf-8", "replace") for found in received]
        self._connection.poll()
        received, self._connection.notifies = self._connection.notifies, []
        return [found.payload for found in received]

    def close(self) -> None:
        self._selector.close()
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._connection.close()

    def abandon(self) -> None:
        """Close the forked child's copy of the socket without sending anything."""
        _ABANDONED.append(self._connection)
        self._selector.close()
        # While the child keeps a copy, the server does not notice the parent's death. The drivers
        # never touch a connection that another process made.
        with contextlib.suppress(Exception):
            os.close(self._connection.fileno())
