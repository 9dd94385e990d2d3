"""A TCP proxy that makes servers distant; runs as ``python -m benchmarks.delay PORT …``.

For each port of a server on this machine it opens another port, and prints these in one line.
It forwards everything in both directions after a delay. Each part is delayed separately, so the
delay does not reduce throughput. A line with a number on standard input changes the delay, in
seconds; the end of standard input ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

SPIN = 60e-6
"""Seconds before a due time during which the process spins, because the kernel wakes it late."""

STDIN = 0
PR_SET_TIMERSLACK = 29


def main(ports: Sequence[str]) -> None:
    # By default Linux may let a sleep last 50 µs longer.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    listeners = {socket.create_server(("127.0.0.1", 0), backlog=128): int(port) for port in ports}
    print(*(listener.getsockname()[1] for listener in listeners), flush=True)
    _forward(listeners)


def _forward(listeners: dict[socket.socket, int]) -> None:
    delay = 0.0
    peers: dict[socket.socket, socket.socket] = {}
    # In the order of due times; ``b""`` is the end of a connection.
    pending: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        while pending and pending[0][0] <= monotonic():
            _pass_on(*pending.popleft()[1:])
        timeout = max(0.0, pending[0][0] - monotonic() - SPIN) if pending else None
        sources: list[Any] = [STDIN, *listeners, *peers]
        readable, _, _ = select.select(sources, [], [], timeout)
        now = monotonic()
        if STDIN in readable:
            readable.remove(STDIN)
            lines = os.read(STDIN, 4096).split()
            if not lines:
                return
            delay = float(lines[-1])
        for one in readable:
            if one in listeners:
                _connect(one, listeners[one], peers)
            else:
                data = _receive(one)
                pending.append((now + delay, peers[one] if data else peers.pop(one), data))


def _connect(listener: socket.socket, port: int, peers: dict[socket.socket, socket.socket]) -> None:
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", port))
    peers |= {client: server, server: client}
    for side in (client, server):
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


def _pass_on(sink: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        if data:
            sink.sendall(data)
        else:
            sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main(sys.argv[1:])
