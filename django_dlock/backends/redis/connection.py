"""One connection to a Redis: send a command, read its reply, both by a deadline.

redis-py opens the connection, so every server that it can reach can be reached from here;
``pool.py`` has ``backends/connector.py`` do so by the deadline. After that, commands and replies
use the socket directly: redis-py's own methods have no deadline, and would double the time that a
lock costs the client.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import ssl
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from redis import exceptions as errors

from ... import clock
from ..shared.keepalive import keep_alive
from .commands import Command
from .polling import Spin, poller
from .route import Route

FAILURES = (errors.RedisError, OSError)
"""Errors that the server, the network or the client raises instead of a reply."""

RECEIVED_AT_ONCE = 65536
SENT_AT_ONCE = 4096
"""Bytes. More may not fit into the socket's buffer, so that sending would wait for the server."""
REPLICAS_TAKE_AT_MOST = 0.5
"""The part of the time left that the server may wait for its replicas. It looks at the clock only
ten times a second, so its answer may come 0.1 s later."""
SHORTEST = 0.001
"""Seconds; a timeout of 0 would make the socket non-blocking."""

FAILED_OVER = frozenset({"CLUSTERDOWN", "MASTERDOWN", "READONLY", "UNBLOCKED"})
"""Errors of a server that is a replica, has just become one, or is cut off from its cluster: a new
connection may lead to the primary."""
TRANSIENT = frozenset({"ASK", "BUSY", "LOADING", "NOREPLICAS", "TRYAGAIN"})
"""Errors of a server that cannot carry out a command yet, but will be able to. ``ASK`` and
``TRYAGAIN`` end when all keys of the slot have moved to another node."""

# Redis 6 puts its own text before the error that ended a script.
_CODE = re.compile(r"(?:.*@user_script: \d+: )?-?([A-Z]+) ", re.DOTALL)
# The host of an IPv6 address has colons, too.
_MOVED = re.compile(r"MOVED \d+ (.*):(\d+)$")

_NOTHING = memoryview(b"")


class ConnectionBroken(errors.ConnectionError):
    """An established connection cannot be used any more; a new one may work."""


class NotDelivered(ConnectionBroken):
    """The system has given the connection up: the other end confirmed nothing that was sent."""


class ErrorReply(errors.ResponseError):
    """The server answered with an error; the connection can still be used.

    Attributes:
        code: The first word of the error, such as ``READONLY``.
    """

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_transient(self) -> bool:
        """Whether the same command may succeed soon."""
        return self.code in TRANSIENT


class Moved(ConnectionBroken):
    """Another node of the cluster has the keys.

    Attributes:
        host: Of that node; empty if it is the host of the node that answered.
        port: Of that node.
    """

    def __init__(self, text: str, host: str, port: int) -> None:
        super().__init__(text)
        self.host, self.port = host, port


class NotConfirmed(errors.TimeoutError):
    """Too few replicas confirmed in time what was written."""


class Connection:
    """See the module; for one thread at a time.

    After any error but ``ErrorReply``, the caller must close the connection: a reply may still
    arrive, and must never be taken for that of the next command.

    Args:
        client: redis-py's connection, already connected. Replies are read as RESP2.
        route: Where the next connections lead; it is told what this server says about that.

    Attributes:
        heard_at: When its last call was answered; kept by the pool.
    """

    __slots__ = (
        "_client",
        "_place",
        "_poll",
        "_received",
        "_route",
        "_sock",
        "_spin",
        "_timeout",
        "_unsent",
        "heard_at",
    )

    def __init__(self, client: Any, spin: Spin, route: Route) -> None:
        # The socket is a private attribute, but all of redis-py's parsers read from it.
        self._client, self._sock, self._route = client, client._sock, route
        self._timeout: float = self._sock.gettimeout()
        self._received, self._unsent = b"", _NOTHING
        self.heard_at = 0.0
        keep_alive(self._sock, self._timeout)
        self._spin, self._poll = spin, poller(self._sock)
        self._place = getattr(client, "host", None), getattr(client, "port", None)

    @property
    def is_reusable(self) -> bool:
        """Whether nothing is left to be sent or read."""
        return not (self._received or self._unsent)

    @property
    def was_left(self) -> bool:
        """Whether another server is the master by now."""
        master = self._route.master
        return master is not None and master != self._place

    def run(self, command: Command[Any], deadline: float) -> tuple[Any, float]:
        """Call a script; returns its reply, and when the call was sent (``clock.now()``)."""
        sent_at = clock.now()
        try:
            return self._round_trip(command.packed, deadline), sent_at
        except ErrorReply as error:
            if error.code != "NOSCRIPT":
                raise
        sent_at = clock.now()
        self.send(command.with_source())
        return self.read(deadline), sent_at

    def run_all(self, commands: Sequence[Command[Any]], deadline: float) -> list[Any]:
        """Call one script several times in one round trip; returns the replies."""
        # The first call contains the source, in case the server does not know the script.
        packed = [command.packed for command in commands[1:]]
        self.send(b"".join([commands[0].with_source(), *packed]))
        replies = [self._read(deadline) for _ in commands]
        for number, reply in enumerate(replies):
            # Behind a proxy, each call may have reached another server.
            if isinstance(reply, ErrorReply) and reply.code == "NOSCRIPT":
                self.send(commands[number].with_source())
                replies[number] = self._read(deadline)
        failed = next((reply for reply in replies if isinstance(reply, errors.RedisError)), None)
        if failed is None:
            return replies
        self._adjust_route(failed)
        try:
            raise failed
        finally:
            # See ``read``.
            del failed, replies, reply

    def confirm(self, replicas: int, deadline: float) -> None:
        """Wait until this many replicas have all that this connection has written.

        Every script that grants or renews a lease writes, so its reply does not matter. Writing
        a key here, too, would fail on a server whose memory is full, which still renews.

        Raises:
            NotConfirmed: Fewer of them answered in time.
        """
        milliseconds = max(1, int(REPLICAS_TAKE_AT_MOST * (deadline - clock.now()) * 1000))
        confirmed = self.execute("WAIT", replicas, milliseconds, deadline=deadline)
        if confirmed < replicas:
            raise NotConfirmed(f"confirmed by {confirmed} of {replicas} replicas in time")

    def execute(self, *words: str | int | bytes, deadline: float) -> Any:
        """Send any command, and return its reply."""
        self.send(b"".join(self._client.pack_command(*words)))
        return self.read(deadline)

    def send(self, packed: bytes) -> None:
        """Send without waiting for the server; ``read`` sends the part that does not fit now."""
        if len(packed) <= SENT_AT_ONCE:
            self._within(self._timeout, self._sock.sendall, packed)
            return
        self._unsent = memoryview(packed)
        try:
            self._send_rest(clock.now())
        except errors.TimeoutError:
            pass

    def read(self, deadline: float) -> Any:
        """The next reply.

        Raises:
            ErrorReply: The reply is an error.
            ConnectionBroken: There will be no reply.
            redis.exceptions.TimeoutError: There was none by the deadline; you may read it later.
        """
        reply = self._read(deadline)
        if isinstance(reply, errors.RedisError):
            self._adjust_route(reply)
            try:
                raise reply
            finally:
                # The error's traceback refers to this frame: a cycle that keeps the connection.
                del reply
        return reply

    def wake(self) -> None:
        """Let a thread that reads stop: it finds that the connection has ended, and closes it.

        Any thread may call this. To close the connection here could make the other one read from
        what is opened next.
        """
        with contextlib.suppress(OSError):
            # Not the method of a TLS socket, which sends without encryption from then on.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._client.disconnect()

    # -- inside ------------------------------------------------------------------------

    def _round_trip(self, packed: bytes, deadline: float) -> Any:
        if self._poll is None:
            self.send(packed)
            return self.read(deadline)
        self.send(packed)
        polled, began = self._spin.polls(), perf_counter()
        if polled:
            self._poll()
        reply = self.read(deadline)
        self._spin.took(perf_counter() - began, polled=polled)
        return reply

    def _read(self, deadline: float) -> Any:
        if self._unsent:
            self._send_rest(deadline)
        while True:
            found = parse_reply(self._received, 0)
            if found is not None:
                reply, end = found
                self._received = self._received[end:]
                # As ``was_left``, without a call, because every reply comes here.
                master = self._route.master
                if master is not None and master != self._place:
                    raise ConnectionBroken("another server is the master now")
                return reply
            left = deadline - clock.now()
            data = self._within(left, self._sock.recv, RECEIVED_AT_ONCE)
            if not data:
                raise ConnectionBroken("the server closed the connection")
            self._received += data

    def _adjust_route(self, error: errors.RedisError) -> None:
        """Learn from the server's error where the next connection should lead."""
        if isinstance(error, Moved):
            self._route.follow(error.host or getattr(self._client, "host", ""), error.port)
        elif isinstance(error, ConnectionBroken):
            self._route.avoid()

    def _send_rest(self, deadline: float) -> None:
        while self._unsent:
            left = deadline - clock.now()
            self._unsent = self._unsent[self._within(left, self._sock.send, self._unsent) :]

    def _within(self, seconds: float, call: Any, argument: Any) -> Any:
        """Call a method of the socket that returns or raises within ``seconds``."""
        # Setting a timeout costs a system call, and the present one nearly always fits.
        usual = self._timeout <= seconds <= 2 * self._timeout
        try:
            if usual:
                return call(argument)
            self._sock.settimeout(max(SHORTEST, seconds))
            try:
                return call(argument)
            finally:
                self._sock.settimeout(self._timeout)
        except TimeoutError as error:
            if error.errno == errno.ETIMEDOUT:
                raise NotDelivered(f"the connection broke: {error}") from error
            raise errors.TimeoutError("no reply within the time allowed") from None
        except OSError as error:
            raise ConnectionBroken(f"the connection broke: {error}") from error


def parse_reply(data: bytes, at: int) -> tuple[Any, int] | None:
    """The reply that begins at ``at``, and where it ends; ``None`` if a part is still missing.

    Raises:
        ConnectionBroken: It is not a reply.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, head, at = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b"+":
        return head, at
    if kind == b"-":
        return _error(head.decode("utf-8", "replace")), at
    try:
        number = int(head)
    except ValueError:
        kind = b""
    if kind == b":":
        return number, at
    if kind == b"$":
        end = at + max(number, 0)
        if number < 0:
            return None, at
        return (data[at:end], end + 2) if len(data) >= end + 2 else None
    if kind == b"*":
        replies: list[Any] = []
        for _ in range(number):
            found = parse_reply(data, at)
            if found is None:
                return None
            reply, at = found
            replies.append(reply)
        return replies, at
    raise ConnectionBroken(f"not a reply of a Redis: {data[:80]!r}")


def _error(text: str) -> errors.RedisError:
    match = _CODE.match(text)
    code = match[1] if match else ""
    if code == "MOVED" and (found := _MOVED.search(text)):
        return Moved(text, found[1], int(found[2]))
    return ConnectionBroken(text) if code in FAILED_OVER else ErrorReply(text, code)


def is_broken_handshake(error: BaseException) -> bool:
    """Whether the server was reached but closed the connection during the handshake."""
    cause = error.__context__
    # redis-py raises the same error for a server that cannot be reached.
    return type(error) is errors.ConnectionError and (
        cause is None or isinstance(cause, (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError))
    )


def is_refusal(error: BaseException) -> bool:
    """Whether the command fails until someone changes the server or the settings."""
    if isinstance(error, ErrorReply):
        return not error.is_transient
    refusals = errors.AuthenticationError, errors.AuthorizationError, errors.ResponseError
    return isinstance(error, refusals) or isinstance(error.__context__, ssl.SSLError)
