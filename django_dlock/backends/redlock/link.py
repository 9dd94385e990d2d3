"""A connection to one node that never blocks: replies are read once they have arrived."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import Any

from redis import exceptions as errors

from ... import clock
from ...lease import LeaseRequest
from ..redis.commands import Command, Commands, text
from ..redis.connection import Connection, ConnectionBroken, parse_reply
from ..redis.lua_source import Script
from ..redis.polling import Spin
from ..redis.route import Route
from .scripts import ACQUIRE_AGAIN, GUARDED
from .tries import late_ms

RECEIVED_AT_ONCE = 65536

_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def connect(route: Route, timeout: float, prefix: str, keep_out: float) -> Link:
    """Connect to a node; takes as long as the name server and the node take.

    Args:
        route: Builds a connection of redis-py without connecting it.
        timeout: Seconds for the node's answer after the handshake.
        keep_out: See ``Link``.

    Raises:
        redis.exceptions.RedisError, OSError: The node cannot be used.
    """
    client = route()
    try:
        client.connect()
        ask = Connection(client, Spin(), route)
        server = text(ask.execute("INFO", "server", deadline=clock.now() + timeout))
        facts = dict(line.split(":", 1) for line in server.splitlines() if ":" in line)
        if not facts.get("run_id"):
            raise errors.ConnectionError("the server has no run id in its INFO")
        return Link(client, facts["run_id"], prefix, keep_out)
    except BaseException:
        client.disconnect()
        raise


class Link:
    """Replies come in the order of the commands. After any error, the link must be closed.

    Args:
        client: redis-py's connection, already connected. Replies are read as RESP2.
        run_id: Of the server; another one means that it was restarted.
        keep_out: Seconds for which the node grants nothing if it may have lost leases.

    Attributes:
        commands: Makes the commands for this server.
    """

    def __init__(self, client: Any, run_id: str, prefix: str, keep_out: float) -> None:
        # The socket is a private attribute, but all of redis-py's parsers read from it.
        self._client, self._sock = client, client._sock
        self._sock.setblocking(False)
        self._received, self._unsent = b"", bytearray()
        self._known: set[str] = set()
        self._keep_out_ms = int(keep_out * 1000)
        self.run_id = run_id
        self.commands = Commands(prefix, self.guarded)

    def guarded(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int],
        read: Callable[[Any, float], Any],
        name: str = "",
    ) -> Command[Any]:
        """A command; if it may say that a name is free, the node refuses it while kept out."""
        if script not in GUARDED:
            return Command(script, keys, args, read, name)
        keys, args = self._guard(keys, args)
        return Command(GUARDED[script], keys, args, read, name)

    def acquire(self, request: LeaseRequest, number: int) -> Command[Any]:
        """Try once; ``number`` tries of this owner were withdrawn before."""
        if not number:
            return self.commands.acquire(request)

        def again(
            script: Script,
            keys: Sequence[str],
            args: Sequence[str | int],
            read: Callable[[Any, float], Any],
            name: str,
        ) -> Command[Any]:
            keys, args = self._guard(keys, args)
            keys = [*keys, self.commands.keys.tries + request.owner]
            args = [*args, number, late_ms(request.ttl)]
            return Command(ACQUIRE_AGAIN, keys, args, read, name)

        return self.commands.acquire(request, make=again)

    def _guard(
        self, keys: Sequence[str], args: Sequence[str | int]
    ) -> tuple[Sequence[str], Sequence[str | int]]:
        node = f"{self.commands.keys.base}node"
        return [*keys, node], [*args, self._keep_out_ms, self.run_id]

    def fileno(self) -> int:
        number: int = self._sock.fileno()
        return number

    @property
    def is_sending(self) -> bool:
        """Whether a part of a command is still to be sent, by ``flush``."""
        return bool(self._unsent)

    def send(self, command: Command[Any]) -> None:
        """Send a command, as far as that is possible without waiting.

        Raises:
            ConnectionBroken: It cannot be sent.
        """
        # The first command with a script contains its source.
        is_known = command.script.sha in self._known
        self._known.add(command.script.sha)
        self._unsent += command.packed if is_known else command.with_source()
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except _NOT_NOW:
            return
        except OSError as error:
            raise ConnectionBroken(f"the connection broke: {error}") from error

    def replies(self) -> list[Any]:
        """The replies that have come since the last call; errors are among them, not raised.

        Raises:
            ConnectionBroken: There will be no more.
        """
        ended = False
        try:
            # Until nothing is left, because TLS may have received more than the socket shows.
            while not ended:
                data = self._sock.recv(RECEIVED_AT_ONCE)
                ended = not data
                self._received += data
        except _NOT_NOW:
            pass
        except OSError as error:
            raise ConnectionBroken(f"the connection broke: {error}") from error
        found: list[Any] = []
        at = 0
        while (parsed := parse_reply(self._received, at)) is not None:
            reply, at = parsed
            found.append(reply)
        self._received = self._received[at:]
        if ended and not found:
            raise ConnectionBroken("the server closed the connection")
        return found

    def close(self) -> None:
        self._client.disconnect()
