"""Where the waiting coroutines of one event loop hear of what is handed over to them.

``redis_mailbox.py`` tells the protocol. Here a task reads the letters of all, for as long as
somebody waits: a coroutine that waits is then nothing but a future, and may be cancelled at any
moment without a letter of another being lost with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis import exceptions as errors

from .. import clock
from ..lease import Contention
from .redis_commands import Letter, read_letter
from .redis_connections import CUT
from .redis_loops import LoopConnections, drop, timeout_at
from .redis_mailbox import ASK_EVERY, FIRST_ASK, KEPT_FOR, SILENCE, SOON

__all__ = ["LoopMailbox"]


class _Waiter:
    """One coroutine in ``LoopMailbox.wait``."""

    __slots__ = ("bell", "error")

    def __init__(self, bell: asyncio.Future[None]) -> None:
        self.bell = bell
        self.error: BaseException | None = None

    def ring(self) -> None:
        if not self.bell.done():
            self.bell.set_result(None)


class LoopMailbox:
    """The mailbox of all coroutines of one event loop on one server.

    Args:
        address: The channel of this mailbox alone.
        timeout: Seconds that the server may take to answer.
    """

    def __init__(self, connections: LoopConnections, address: str, timeout: float) -> None:
        self.address = address
        self._connections, self._timeout = connections, timeout
        self._loop = connections.loop
        self._connection: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._last_reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, _Waiter] = {}
        self._letters: dict[str, Letter] = {}
        self._subscribed_at = 0.0
        self._breaks = 0
        connections.at_close(self.close)

    def close(self) -> None:
        """Close the connection unless somebody waits."""
        if not self._waiting:
            self._drop()

    async def wait(
        self, owner: str, met: Contention, *, until: float, interrupted: Callable[[], bool]
    ) -> Letter | None:
        """Wait for a letter; ``None`` where the owner had better ask again.

        Raises:
            redis.exceptions.RedisError, OSError: The server cannot be listened to.
        """
        waiter = self._waiting[owner] = _Waiter(self._loop.create_future())
        ask_at = clock.now() + FIRST_ASK
        try:
            while True:
                letter = self._letters.pop(owner, None)
                if letter is not None and (not letter.token or letter.token > met.token):
                    return letter
                if self._connection is not None and met.asked_at <= self._subscribed_at:
                    return None
                now = clock.now()
                if now >= until:
                    return None
                if now >= ask_at:
                    if interrupted():
                        return None
                    ask_at = now + ASK_EVERY
                if self._reader is None or self._reader.done():
                    self._reader = self._loop.create_task(self._read(self._last_reader))
                await asyncio.wait({waiter.bell}, timeout=min(until, ask_at) - now)
                if waiter.error is not None:
                    raise waiter.error
                if waiter.bell.done():
                    waiter.bell = self._loop.create_future()
        finally:
            self._leave(owner, waiter)

    def _leave(self, owner: str, waiter: _Waiter) -> None:
        if self._waiting.get(owner) is waiter:
            del self._waiting[owner]
        if self._waiting:
            return
        reader, self._reader = self._reader, None
        # A coroutine that is collected after its loop has ended comes here, too.
        if reader is not None and not self._loop.is_closed():
            reader.cancel()
            self._last_reader = reader
        if self._connections.ended:
            self._drop()

    # -- the reader --------------------------------------------------------------------

    async def _read(self, last: asyncio.Task[None] | None) -> None:
        """Read letters until it is cancelled, or the connection lost."""
        try:
            if last is not None:
                # It is cancelled; two cannot read the same stream.
                await asyncio.wait({last})
            if self._connection is None:
                await self._subscribe()
                self._ring_all()
            while True:
                self._deliver(await self._message())
        except Exception as error:  # noqa: BLE001 - its waiters raise it
            self._lost(error)
        finally:
            # Cancelled by a stranger, it is followed by another.
            self._ring_all()

    async def _subscribe(self) -> None:
        try:
            async with timeout_at(self._loop.time() + self._timeout):
                connection = await self._subscribed()
        except asyncio.TimeoutError as error:
            raise errors.TimeoutError("no subscription within the time allowed") from error
        # Not before it stands.
        self._subscribed_at = clock.now()
        self._connection = connection

    async def _subscribed(self) -> Any:
        """A connection that has; like a command, a subscription may be cut twice."""
        breaks = 0
        while True:
            connection = await self._connections.connect()
            try:
                await connection.send_command("SUBSCRIBE", self.address)
                await connection.read_response()
            except BaseException as error:
                drop(connection)
                breaks += 1
                if breaks == 3 or not isinstance(error, CUT):
                    raise
            else:
                return connection

    async def _message(self) -> Any:
        """The next one; a silent server is asked whether it is there.

        Raises:
            asyncio.TimeoutError: It is not.
        """
        try:
            return await self._response(SILENCE)
        except asyncio.TimeoutError:
            await self._connection.send_command("PING")
            return await self._response(self._timeout)

    async def _response(self, seconds: float) -> Any:
        async with timeout_at(self._loop.time() + seconds):
            # What was read of a letter is kept when this is cancelled; the next reader goes on.
            return await self._connection.read_response(disconnect_on_error=False)

    def _deliver(self, message: Any) -> None:
        read = read_letter(message[2]) if message[0] == b"message" else None
        if read is None:
            return
        owner, letter = read
        for other, kept in list(self._letters.items()):
            if letter.read_at - kept.read_at > KEPT_FOR:
                del self._letters[other]
        self._letters[owner] = letter
        waiter = self._waiting.get(owner)
        if waiter is not None:
            waiter.ring()

    def _lost(self, error: Exception) -> None:
        cut = self._connection is not None and isinstance(error, (*CUT, asyncio.TimeoutError))
        soon = clock.now() - self._subscribed_at < SOON
        self._breaks = self._breaks + 1 if cut and soon else 0
        self._drop()
        # A third in a row is no accident, and asking again would be a loop without a pause.
        if not cut or self._breaks == 3:
            self._breaks = 0
            for waiter in self._waiting.values():
                waiter.error = error

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            drop(connection)

    def _ring_all(self) -> None:
        for waiter in self._waiting.values():
            waiter.ring()
