"""Has the system notice that a connection is dead, and keep networks from forgetting it."""

from __future__ import annotations

import contextlib
import socket

IDLE, INTERVAL, PROBES = 30, 10, 3
"""Seconds of silence before the system probes the other end, and between probes; and how many
probes may stay unanswered. Firewalls and NATs forget a connection after some minutes."""
UNCONFIRMED = 0.25
"""The part of a command's time after which data that the other system has not confirmed breaks
the connection, so that the call can be repeated on a new one. A server that is slow confirms. The
system looks only now and then, so it may take twice as long."""


def keep_alive(sock: socket.socket, timeout: float) -> None:
    """Set the options of a socket; does nothing where there are none, as for a Unix socket.

    Args:
        timeout: Seconds that a command may take.
    """
    options = {
        "TCP_KEEPIDLE": IDLE,
        # The name of the same option on macOS.
        "TCP_KEEPALIVE": IDLE,
        "TCP_KEEPINTVL": INTERVAL,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": max(1, round(1000 * UNCONFIRMED * timeout)),
    }
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
