"""The socket of a driver's connection, for the thread that cuts late calls."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from ...log import logger
from ..shared.keepalive import keep_alive


class SocketHandle:
    """A descriptor of our own for the socket of a connection, made in the thread that connected.

    While a call runs, mysqlclient tells no other thread its descriptor. And a driver may close its
    descriptor in the middle of a call that fails; any other file may get its number then.

    Args:
        number: The driver's descriptor.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._socket = socket.socket(fileno=os.dup(number))

    def shut_down(self) -> None:
        """Make the running call fail, from any thread."""
        # It is not connected any more if the server or the driver has ended it.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def keep_alive(self, timeout: float) -> None:
        """Have the system notice a connection that is dead; see ``keepalive``."""
        keep_alive(self._socket, timeout)

    def close(self) -> None:
        self._socket.close()

    def leave_to_parent(self) -> None:
        """In a forked child: let nothing that the driver sends reach the server."""
        with contextlib.suppress(OSError):
            # Not if the driver had closed it: the number may belong to another file.
            if os.path.sameopenfile(self._number, self._socket.fileno()):
                nowhere = os.open(os.devnull, os.O_RDWR)
                try:
                    os.dup2(nowhere, self._number)
                finally:
                    os.close(nowhere)
        self._socket.close()


_told: set[str] = set()
"""The drivers of which a warning was logged."""


def handle_of(raw: Any, driver: Any) -> SocketHandle | None:
    """The handle of a new connection of this driver; ``None``, with a warning, if there is none.

    Raises:
        OSError: This process has no free descriptor.
    """
    try:
        # In PyMySQL only the socket has this method.
        number: int = raw.fileno() if hasattr(raw, "fileno") else raw._sock.fileno()
    except Exception as error:  # noqa: BLE001 - a driver of which nothing is known
        name = str(getattr(driver, "__name__", driver))
        if name not in _told:
            _told.add(name)
            logger.warning(
                "Calls of the database driver %s have no deadline: it tells no socket: %r",
                name,
                error,
            )
        return None
    return SocketHandle(number)
