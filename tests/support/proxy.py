"""A TCP proxy in front of a server that loses what it is told to lose."""

from __future__ import annotations

import contextlib
import ctypes
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import ClassVar, Literal, final

How = Literal["close", "swallow", "refuse", "keep"]
Way = Literal["up", "down"]
"""To the server, or from it."""
Fault = How | bytes
"""What to do with a command; bytes are sent as the reply instead of the server's."""

Protocol = Literal["redis", "postgres", "amqp", "etcd", "zookeeper"]

SCRIPTS = ("EVALSHA", "EVAL")
GOODBYES = (b"X\0\0\0\4", b"\1\0\0\0\1")
"""What clients of PostgreSQL and MySQL send before they close a connection."""
SO_ATTACH_FILTER = 26
"""Of Linux; Python's ``socket`` does not name it."""


class _Requests:
    """Reads the names of commands from the bytes of one client; this class knows none."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[str]:
        self._buffer += data
        names: list[str] = []
        while (name := self._one()) is not None:
            names.append(name)
        return [name for name in names if name]

    def _one(self) -> str | None:
        """The next name, empty if a command has none; ``None`` until its bytes are complete."""
        self._buffer = b""
        return None


class _RedisRequests(_Requests):
    def _one(self) -> str | None:
        # A replica that loads its primary's data sends line ends as signs of life.
        head, line_end, rest = self._buffer.lstrip(b"\n").partition(b"\r\n")
        if not line_end:
            return None
        words: list[bytes] = []
        for _ in range(int(head[1:])):
            size, line_end, rest = rest.partition(b"\r\n")
            if not line_end or len(rest) < int(size[1:]) + 2:
                return None
            words.append(rest[: int(size[1:])])
            rest = rest[int(size[1:]) + 2 :]
        self._buffer = rest
        return words[0].decode().upper()


class _PostgresRequests(_Requests):
    """The first words of statements.

    Settings of one transaction that stand before a statement are left out. A prepared statement of
    ours has a name instead of a word, such as ``ACQUIRE``.

    A client may name its own next statement of a kind: after ``SELECT 'mine: COMMIT'`` its next
    COMMIT is called ``mine``.
    """

    PROTOCOL = 3 << 16
    NAMING = re.compile(rb"SELECT '([a-z ]+): ([A-Z]+)'")
    SETTINGS = re.compile(rb"(SET LOCAL [^;]+;\s*)+")
    PREPARED = re.compile(rb"(?:EXECUTE|PREPARE) dlock_([a-z_]+)_[0-9a-f]{12}\b")

    def __init__(self) -> None:
        super().__init__()
        self._started = False
        self._names: dict[str, str] = {}

    def _one(self) -> str | None:
        at = 1 if self._started else 0
        if len(self._buffer) < at + 4:
            return None
        (size,) = struct.unpack_from("!i", self._buffer, at)
        if len(self._buffer) < at + size:
            return None
        kind, body = self._buffer[:at], self._buffer[at + 4 : at + size]
        self._buffer = self._buffer[at + size :]
        if not self._started:
            # A client may first ask for encryption.
            self._started = struct.unpack_from("!i", body) == (self.PROTOCOL,)
            return ""
        if kind not in (b"P", b"Q"):
            return ""
        # A prepared statement has a name before its text.
        statement = body.split(b"\0")[1 if kind == b"P" else 0]
        if naming := self.NAMING.match(statement):
            self._names[naming[2].decode()] = naming[1].decode()
        statement = self.SETTINGS.sub(b"", statement, count=1)
        statement = self.PREPARED.sub(rb"\1", statement, count=1)
        word = (statement.split() or [b""])[0].decode(errors="replace").upper()
        return self._names.pop(word, word)


class _EtcdRequests(_Requests):
    """Calls of the JSON gateway; a transaction is named after what it may do to a key."""

    LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
    KINDS = ("put", "delete_range", "range")

    def _one(self) -> str | None:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = self.LENGTH.search(head)
        if not end or length is None or len(rest) < int(length[1]):
            return None
        body, self._buffer = rest[: int(length[1])], rest[int(length[1]) :]
        path = head.split(b" ", 2)[1].decode().removeprefix("/v3/")
        if path != "kv/txn":
            return path
        return next(kind for kind in self.KINDS if f'"request_{kind}"'.encode() in body)


class _ZooKeeperRequests(_Requests):
    NAMES: ClassVar = {1: "CREATE", 2: "DELETE", 3: "EXISTS", 4: "GET", 5: "SET", 15: "CREATE"}

    def __init__(self) -> None:
        super().__init__()
        self._started = False

    def _one(self) -> str | None:
        if len(self._buffer) < 4:
            return None
        (size,) = struct.unpack_from("!i", self._buffer)
        if len(self._buffer) < 4 + size:
            return None
        body, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
        if not self._started:
            self._started = True
            return "CONNECT"
        return self.NAMES.get(struct.unpack_from("!ii", body)[1], "OTHER")


REQUESTS: dict[Protocol, type[_Requests]] = {
    "redis": _RedisRequests,
    "postgres": _PostgresRequests,
    "amqp": _Requests,
    "etcd": _EtcdRequests,
    "zookeeper": _ZooKeeperRequests,
}


@final
class Proxy:
    """Forwards to ``target`` and counts; a context manager, without faults at first.

    Args:
        speaks: The protocol. On PostgreSQL, a command is the first word of a statement. On AMQP no
            commands are known, so none can be counted or lose its reply. On etcd, a transaction is
            called ``put``, ``delete_range`` or ``range``, and other calls by their path.

    Attributes:
        commands: The names of all commands forwarded or lost, in order.
        connections: How many clients have connected so far.
        replies_dropped: How many replies were lost on request.
        swallowed: How often clients have sent data that a black hole dropped.
        tried: The forgotten connections on which a client has sent more than a goodbye.
    """

    def __init__(self, host: str, port: int, *, speaks: Protocol = "redis") -> None:
        self._target = (host, port)
        self.speaks = speaks
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._pairs: set[_Pair] = set()
        self._drops: list[tuple[Fault, tuple[str, ...]]] = []
        self._kept: list[_Pair] = []
        self._silent: Way | None = None
        self._always: dict[str, How] = {}
        self.black_holed = False
        self.delay = 0.0
        self.commands: list[str] = []
        self.connections = 0
        self.replies_dropped = 0
        self.swallowed = 0
        self.tried: set[tuple[int, int]] = set()
        self.port = 0
        self.accept()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.refuse()

    # -- faults ------------------------------------------------------------------------

    def drop_replies(
        self, count: int = 1, *, how: How = "close", of: tuple[str, ...] = SCRIPTS
    ) -> None:
        """Lose the replies to the next ``count`` commands after the server has executed them.

        ``close`` closes the client's connection instead; ``swallow`` leaves the client waiting.
        ``refuse`` closes it before the server receives the command.
        """
        with self._changed:
            self._drops += [(how, of)] * count

    def keep(self, count: int = 1, *, of: tuple[str, ...] = SCRIPTS) -> None:
        """Keep the next ``count`` commands on their way to the server, until ``deliver``.

        What their clients send or close after them is kept as well, as a slow network would.
        """
        with self._changed:
            self._drops += [("keep", of)] * count

    def deliver(self) -> None:
        """Let the server carry out the oldest command that was kept, even if its client is gone."""
        with self._changed:
            pair = self._kept.pop(0)
        pair._delivered.set()
        if not pair._answered.wait(10.0):
            raise AssertionError("the server did not answer what was kept")

    @property
    def kept(self) -> int:
        """How many commands are kept now."""
        return len(self._kept)

    def reply(self, with_: bytes, count: int = 1, *, of: tuple[str, ...] = SCRIPTS) -> None:
        """Answer the next ``count`` commands instead of the server, which gets none of them."""
        with self._changed:
            self._drops += [(with_, of)] * count

    def always(self, how: How, *, of: str) -> None:
        """As ``drop_replies``, for every command with this name from now on."""
        with self._changed:
            self._always[of] = how

    def black_hole(self) -> None:
        """Accept connections and bytes from now on, and forward nothing in either direction."""
        self.black_holed = True

    def forget(self, *, acknowledges: bool = True) -> None:
        """Forget all connections, as a NAT does that was restarted: nothing that either end sends
        on them arrives any more, and neither is told. New connections work.

        Args:
            acknowledges: Whether the client's system is told that its data has arrived, as by a
                proxy whose server has moved; if not, as by a router. Linux only.
        """
        with self._changed:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.is_forgotten = True
            if not acknowledges:
                pair.drop_packets()

    @property
    def open(self) -> int:
        """How many connections the clients have not closed, forgotten ones included."""
        with self._changed:
            return len(self._pairs)

    def silence(self, way: Way) -> None:
        """Lose what is sent this way, on all connections, until ``heal``."""
        with self._changed:
            self._silent = way
            for pair in self._pairs:
                pair.silent = way

    def heal(self) -> None:
        """Forward again; connections that may have lost bytes are cut."""
        # Cut first: what a client sends between these lines must not arrive on a connection that
        # has lost something.
        self.cut()
        self.black_holed, self._silent = False, None
        self.cut()

    def cut(self, *, but: Collection[int] = ()) -> None:
        """Close all connections."""
        with self._changed:
            pairs = [pair for pair in self._pairs if pair.ports[0] not in but]
        for pair in pairs:
            pair.close()

    def refuse(self, *, but: Collection[int] = ()) -> None:
        """Close all connections and refuse new ones.

        Args:
            but: The ports of clients that keep their connections; see ``links``.
        """
        listener, self._listener = self._listener, None
        if listener is not None:
            # This wakes the accepting thread; ``close`` alone does not.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut(but=but)

    def lead_to(self, port: int) -> None:
        """Forward new connections to this port."""
        self._target = (self._target[0], port)

    @property
    def links(self) -> dict[int, int]:
        """The port of every client, and the port by which the server knows it."""
        with self._changed:
            return {pair.ports[0]: pair.ports[1] for pair in self._pairs}

    def accept(self) -> None:
        """Accept connections (again), on the same port."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(512)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    # -- what happened -----------------------------------------------------------------

    def count(self, *names: str) -> int:
        """How many commands with these names have passed; all commands if no name is given."""
        return sum(1 for command in self.commands if not names or command in names)

    def wait_until(self, happened: Callable[[Proxy], bool], timeout: float = 10.0) -> None:
        """Block until ``happened(self)``; checked whenever something passes."""
        with self._changed:
            if not self._changed.wait_for(lambda: happened(self), timeout):
                raise AssertionError(f"did not happen within {timeout} s; saw {self.commands}")

    # -- internals ------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._changed:
                self.connections += 1
                self._changed.notify_all()
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                # Else a command in two parts would wait for the server to acknowledge the first.
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = _Pair(self, client, server)
            with self._changed:
                pair.silent = self._silent
                self._pairs.add(pair)
            pair.start()

    def _saw(self, names: list[str]) -> Fault | None:
        """Note commands that came together; return what to do with them, if anything."""
        with self._changed:
            self.commands += names
            how: Fault | None = None
            for name in names:
                how = self._always.get(name, how)
                if self._drops and name in self._drops[0][1]:
                    how = self._drops.pop(0)[0]
            self._changed.notify_all()
            return how

    def _dropped(self) -> None:
        with self._changed:
            self.replies_dropped += 1
            self._changed.notify_all()

    def _keeps(self, pair: _Pair) -> None:
        with self._changed:
            pair._delivered, pair._answered = threading.Event(), threading.Event()
            self._kept.append(pair)
            self._changed.notify_all()

    def _swallowed(self, pair: _Pair, data: bytes) -> None:
        with self._changed:
            self.swallowed += 1
            if pair.is_forgotten and data not in GOODBYES:
                self.tried.add(pair.ports)
            self._changed.notify_all()

    def _ended(self, pair: _Pair) -> bool:
        """Note that one direction of the pair has ended; return whether both have."""
        with self._changed:
            pair._pumps -= 1
            self._pairs.discard(pair)
            self._changed.notify_all()
            return pair._pumps == 0


class _Pair:
    """One client and its connection to the server."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._requests = REQUESTS[proxy.speaks]()
        self._lose: How | None = None
        self.silent: Way | None = None
        # For a command that is kept on its way to the server.
        self._delivered, self._answered = threading.Event(), threading.Event()
        self._pumps = 2
        self.is_forgotten = False
        self.ports: tuple[int, int] = (client.getpeername()[1], server.getsockname()[1])

    def start(self) -> None:
        for pump in (self._upwards, self._downwards):
            threading.Thread(target=self._run, args=(pump,), daemon=True).start()

    def close(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def drop_packets(self) -> None:
        """Drop every packet of the client before this system sees it, so that none is confirmed."""
        # A filter of one instruction: keep 0 bytes of the packet.
        instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
        program = struct.pack("HL", 1, ctypes.addressof(instruction))
        self._client.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    def _run(self, pump: Callable[[], None]) -> None:
        try:
            pump()
        except OSError:
            pass
        finally:
            self.close()
            if self._proxy._ended(self):
                self._client.close()
                self._server.close()

    def _upwards(self) -> None:
        while data := self._client.recv(65536):
            how = self._proxy._saw(self._requests.feed(data))
            if self._proxy.black_holed or self.is_forgotten or self.silent == "up":
                self._proxy._swallowed(self, data)
                continue
            if isinstance(how, bytes):
                self._proxy._dropped()
                self._client.sendall(how)
                continue
            if how == "refuse":
                self._proxy._dropped()
                return
            if how == "keep":
                self._proxy._keeps(self)
                self._delivered.wait()
                self._server.sendall(data)
                # A server may drop the command of a client that has gone meanwhile.
                self._answered.wait()
                continue
            if how is not None:
                self._lose = how
            self._server.sendall(data)

    def _received(self) -> bytes:
        try:
            return self._server.recv(65536)
        finally:
            if self._delivered.is_set():
                self._answered.set()

    def _downwards(self) -> None:
        while data := self._received():
            if self._proxy.delay:
                time.sleep(self._proxy.delay)
            if self._proxy.black_holed or self.is_forgotten or self.silent == "down":
                continue
            lose, self._lose = self._lose, None
            if lose is None:
                self._client.sendall(data)
                continue
            self._proxy._dropped()
            if lose == "close":
                return
