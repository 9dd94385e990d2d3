"""Counts round trips and commands: what passes a proxy, and what the server ran.

A proxy sees the bytes, so any way of a client to send them is counted. The proxy takes time, so
nothing that is timed goes through it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from redis import Redis


@dataclass
class Counted:
    """The counts.

    Attributes:
        round_trips: How often a client sent after the server had sent. A pipeline is one; an
            unsolicited message of the server is none.
        commands: How many commands or statements clients sent.
    """

    round_trips: int = 0
    commands: int = 0


def redis_commands(data: bytes) -> tuple[int, bytes]:
    """How many whole commands ``data`` begins with, and the bytes after them."""
    commands = 0
    while True:
        head, line_end, rest = data.partition(b"\r\n")
        if not line_end:
            return commands, data
        for _ in range(int(head[1:])):
            size, line_end, rest = rest.partition(b"\r\n")
            if not line_end or len(rest) < int(size[1:]) + 2:
                return commands, data
            rest = rest[int(size[1:]) + 2 :]
        commands, data = commands + 1, rest


def postgres_commands(data: bytes) -> tuple[int, bytes]:
    """As ``redis_commands``: queries and executions of statements."""
    commands = 0
    while len(data) >= 5:
        # The first message of a connection has no type before its size, whose first byte is 0.
        at = 1 if data[0] else 0
        (size,) = struct.unpack_from("!i", data, at)
        if len(data) < at + size:
            break
        commands += data[:at] in (b"Q", b"E")
        data = data[at + size :]
    return commands, data


def http_commands(data: bytes) -> tuple[int, bytes]:
    """As ``redis_commands``: requests with their bodies."""
    commands = 0
    while True:
        head, head_end, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        if not head_end or len(body) < size:
            return commands, data
        commands, data = commands + 1, body[size:]


def zookeeper_commands(data: bytes) -> tuple[int, bytes]:
    """As ``redis_commands``: requests, without the handshake and pings."""
    commands = 0
    while len(data) >= 8:
        size, number = struct.unpack_from("!ii", data)
        if len(data) < 4 + size:
            break
        # The client gives its own requests positive numbers.
        commands += number > 0
        data = data[4 + size :]
    return commands, data


_COUNTS = {
    "redis": redis_commands,
    "postgresql": postgres_commands,
    "http": http_commands,
    "zookeeper": zookeeper_commands,
}
"""By the scheme of the URL."""


class CountingProxy:
    """Forwards to the server of a URL and counts; a context manager.

    Attributes:
        url: The URL of the server through the proxy.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._commands = _COUNTS[parts.scheme]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        port = self._listener.getsockname()[1]
        user = f"{parts.username}@" if parts.username else ""
        self.url = parts._replace(netloc=f"{user}127.0.0.1:{port}").geturl()
        self._total = Counted()
        self._lock = threading.Lock()

    def __enter__(self) -> CountingProxy:
        self._thread(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            # This wakes the accepting thread; ``close`` alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def total(self) -> Counted:
        """The counts so far."""
        with self._lock:
            return Counted(self._total.round_trips, self._total.commands)

    # -- internals ------------------------------------------------------------------------

    @staticmethod
    def _thread(target: object, *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            for side in (client, server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            turn = _Turn()
            self._thread(self._pump, client, server, turn, True)
            self._thread(self._pump, server, client, turn, False)

    def _pump(self, source: socket.socket, sink: socket.socket, turn: _Turn, asks: bool) -> None:
        count, rest = self._commands, b""
        try:
            while data := source.recv(1 << 16):
                if not asks:
                    turn.server_spoke = True
                else:
                    commands, rest = count(rest + data)
                    with self._lock:
                        self._total.commands += commands
                        self._total.round_trips += turn.server_spoke
                    turn.server_spoke = False
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for side in (source, sink):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)
            if asks:
                source.close()
                sink.close()


class _Turn:
    """Which side of a connection sent last."""

    server_spoke = True


def server_commands(client: Redis) -> int:
    """How many commands the server has run, including those in scripts, without this query.

    A second reading counts the query of the first one; subtract one for it.
    """
    stats = client.info("commandstats")
    return sum(facts["calls"] for facts in stats.values())
