"""Two ways to carry out a command on a connection of ours: by itself, or by redis-py's client.

The client's layer costs as much again as all else that a lock costs, so it is left out unless
``OPTIONS["client"]`` asks for it: what patches ``Redis.execute_command``, as tracing does, sees
only what goes that way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from redis import ConnectionPool, Redis

from .. import clock
from .redis_commands import Command
from .redis_reply import PONG

__all__ = ["CLIENTS", "ByClient", "ByConnection", "Talk"]

CLIENTS = ("connection", "redis-py")
"""What ``OPTIONS["client"]`` may be, the default first."""

Read: TypeAlias = Callable[..., Any]
"""``RedisConnections.read``."""

BRIEF = 0.0005
"""Seconds of a hold, up to which its end is one of a quick succession."""

_PING = b"*1\r\n$4\r\nPING\r\n"


class Talk(Protocol):
    """Sends on a connection and reads the reply; both may raise redis-py's errors."""

    def run(self, connection: Any, command: Command[Any], deadline: float) -> Any:
        """Call the script by its digest."""

    def say(self, connection: Any, *words: str | int | bytes, deadline: float) -> Any:
        """Any command."""


class ByConnection:
    """See the module."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def run(self, connection: Any, command: Command[Any], deadline: float) -> Any:
        if not command.handed_at:
            connection.send_packed_command((command.packed,))
            return self._read(connection, deadline)
        # Of those to whom Redis has something to write, it begins with the one that came last. A
        # caller to whom it owes an answer already comes after the waiter that the script wakes.
        # PING may be refused to this user; the other one is answered all the same.
        connection.send_packed_command((_PING + command.packed,))
        # In a quick succession this thread soon goes on, to wait again perhaps. After a longer hold
        # everybody sleeps, and one who looks keeps a processor from those who are woken.
        brief = clock.now() - command.handed_at < BRIEF
        return self._read(connection, deadline, after=PONG, look=brief)

    def say(self, connection: Any, *words: str | int | bytes, deadline: float) -> Any:
        connection.send_command(*words)
        return self._read(connection, deadline)


class ByClient:
    """Through ``Redis.execute_command`` of one client, which is lent our connections.

    Args:
        kwargs: What the connections are made with, for tracing, which reads it at the pool.
    """

    def __init__(self, read: Read, kwargs: Mapping[str, Any]) -> None:
        self._read = read
        self._lender = _Lender(**kwargs)
        self._client: Any = Redis(connection_pool=self._lender)
        # Replies are read by whoever sent the command.
        self._client.response_callbacks.clear()

    def run(self, connection: Any, command: Command[Any], deadline: float) -> Any:
        keys, args = command.words()
        words = "EVALSHA", command.script.sha, len(keys), *keys, *args
        return self.say(connection, *words, deadline=deadline)

    def say(self, connection: Any, *words: str | int | bytes, deadline: float) -> Any:
        lent = self._lender.lent
        before = getattr(lent, "connection", None)
        lent.connection = _Bounded(connection, self._read, deadline)
        try:
            return self._client.execute_command(*words)
        finally:
            # A signal handler's own command may have come between another's.
            lent.connection = before


class _Lender(ConnectionPool):
    """Hands out to each thread the connection that it has been lent, and keeps none."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lent = threading.local()

    def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        return self.lent.connection

    def release(self, connection: Any) -> None:
        """It is its lender's."""


class _Bounded:
    """A connection whose reply is awaited until a deadline, and not for as long as it likes."""

    def __init__(self, connection: Any, read: Read, deadline: float) -> None:
        self._connection, self._read, self._deadline = connection, read, deadline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        return self._read(self._connection, self._deadline)
