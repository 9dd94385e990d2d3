"""Takes the replies that locks live on off the socket; all others are redis-py's to read.

Its reader is made for every reply there is, and takes longer for one number than it takes to ask
for it. A lock is told a number or a text, in one piece nearly always. So the reply is looked at
where it lies; if it is one of these two and complete it is taken, and otherwise nothing has
happened yet.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from redis import exceptions as errors
from redis.connection import AbstractConnection
from redis.sentinel import SentinelManagedConnection

__all__ = ["PONG", "take"]

LONGEST = 4096
"""Bytes; a longer one is redis-py's to read."""

PONG = b"+PONG\r\n"

# What a project's own ``read_response`` does with replies, it shall do with all of them.
_USUAL = frozenset({AbstractConnection.read_response, SentinelManagedConnection.read_response})


def take(connection: Any, after: bytes = b"") -> int | bytes | None:
    """The reply that comes next, once it comes; ``None`` where redis-py must read it.

    Args:
        connection: On which redis-py has read nothing ahead, and whose caller has the whole of
            its socket's timeout left to wait.
        after: A reply before that one, to be taken with it.

    Raises:
        redis.exceptions.TimeoutError, redis.exceptions.ConnectionError: It does not come.
    """
    # Not a part of redis-py's public face, but what each of its parsers reads from.
    sock = getattr(connection, "_sock", None)
    # TLS cannot be looked at without reading. gevent's sockets take the place of the system's, and
    # can.
    if type(sock) is not socket.socket or type(connection).read_response not in _USUAL:
        return None
    try:
        data = sock.recv(LONGEST, socket.MSG_PEEK)
        reply = _complete(data, after)
        if reply is not None:
            _read(sock, len(data))
    except TimeoutError as error:
        raise errors.TimeoutError("no reply within the time allowed") from error
    except OSError as error:
        raise errors.ConnectionError(f"the connection broke: {error}") from error
    return reply


def _read(sock: socket.socket, length: int) -> None:
    """Take what is known to be there."""
    if os.name == "posix":
        # A socket with a timeout would look whether it is there, at the price of a system call.
        os.read(sock.fileno(), length)
    else:
        sock.recv(length)


def _complete(data: bytes, after: bytes) -> int | bytes | None:
    """The number or text of which ``data`` consists, behind ``after``; ``None`` for all else."""
    at = len(after)
    if after and not data.startswith(after):
        return None
    end = data.find(b"\r\n", at)
    kind, head = data[at : at + 1], data[at + 1 : end]
    if end < 0 or not head.isdigit():
        return None
    if kind == b":" and end + 2 == len(data):
        return int(head)
    if kind == b"$" and end + 2 + int(head) + 2 == len(data):
        return data[end + 2 : -2]
    return None
