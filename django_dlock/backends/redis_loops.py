"""Connections to one Redis for coroutines: each event loop has its own, and a bounded number.

A connection belongs to the loop that made it. It is kept while that loop runs and closed when it
ends, which a loop tells nobody but its asynchronous generators; so one of them stands guard.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from redis import exceptions as errors

from .. import clock
from .redis_connections import CUT, FAILURES
from .redis_parameters import LoopMaker

if sys.version_info >= (3, 11, 3):
    from asyncio import timeout_at
else:
    # What redis-py itself uses there, and brings along.
    from async_timeout import timeout_at  # type: ignore[no-redef]

__all__ = ["LoopConnections", "Loops", "drop", "timeout_at"]

T = TypeVar("T")
C = TypeVar("C", bound="LoopConnections")

_Queue = collections.OrderedDict["asyncio.Future[None]", None]
"""Those who wait for a place; whoever gives up leaves it from the middle."""


class LoopConnections:
    """A bounded pool for the coroutines of one loop; those beyond the bound queue for a turn.

    Args:
        limit: Connections at the most, but for those of ``connect``.

    Attributes:
        ended: The loop is about to close: nothing is kept any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, maker: LoopMaker, limit: int) -> None:
        self.loop = loop
        self._maker = maker
        self._idle: list[Any] = []
        self._free = limit
        # What lets go of a lease, or prolongs one, never queues behind what wants one.
        self._urgent, self._others = _Queue(), _Queue()
        self.ended = False
        self._closers: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._closing: asyncio.Task[None] | None = None
        self._guard = self._watch()
        # Its first step makes it known to the loop, and waits for nothing.
        _run(self._guard.__anext__())
        _keep(self)

    # -- calls -------------------------------------------------------------------------

    async def call(
        self, talk: Callable[[Any], Awaitable[T]], *, deadline: float, urgent: bool = False
    ) -> T:
        """Let ``talk`` use a connection, and again on new ones while they prove broken.

        Args:
            talk: As in ``RedisConnections.call``: what it says must be idempotent.
            urgent: Goes before the others where all connections are in use.

        Raises:
            redis.exceptions.RedisError, OSError: No answer, or the server's refusal.
        """
        try:
            async with timeout_at(self.loop.time() + deadline - clock.now()):
                if self._free:
                    self._free -= 1
                else:
                    await self._turn(self._urgent if urgent else self._others)
                try:
                    return await self._talk(talk)
                finally:
                    self._next()
        except asyncio.TimeoutError as error:
            raise errors.TimeoutError("no reply within the time allowed") from error

    async def _talk(self, talk: Callable[[Any], Awaitable[T]]) -> T:
        connection, breaks = (self._idle.pop() if self._idle else None), 0
        while True:
            if connection is None:
                connection = await self.connect()
            try:
                answer = await talk(connection)
            except CUT:
                # As for threads: an idle one may have been closed long ago, and a reply may be
                # lost on a new one, too; a third break in a row is no accident.
                drop(connection)
                connection, breaks = None, breaks + 1
                if breaks == 3:
                    raise
            except BaseException:
                # A cancellation, too: a late reply must never answer the next command.
                drop(connection)
                raise
            else:
                if self.ended:
                    drop(connection)
                else:
                    self._idle.append(connection)
                return answer

    async def connect(self) -> Any:
        """A new connection, beyond the bound; to be dropped by the caller."""
        connection = self._maker.make()
        try:
            await connection.connect()
        except BaseException:
            drop(connection)
            raise
        return connection

    async def _turn(self, queue: _Queue) -> None:
        """Wait for the place of one who has finished."""
        turn = self.loop.create_future()
        queue[turn] = None
        try:
            await turn
        except BaseException:
            queue.pop(turn, None)
            if turn.done() and not turn.cancelled():
                # It came in the same moment: the next one takes it.
                self._next()
            raise

    def _next(self) -> None:
        """Give a place to the one that has queued longest."""
        if self.loop.is_closed():
            # A coroutine that is collected after its loop has ended: nobody can be woken.
            return
        while queue := self._urgent or self._others:
            turn, _ = queue.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def at_close(self, closer: Callable[[], None]) -> None:
        """Call it, in the loop, whenever idle connections are closed, and at the end."""
        self._closers.append(closer)

    # -- the end -----------------------------------------------------------------------

    async def _watch(self) -> AsyncGenerator[None, None]:
        """Closed by the loop when all its tasks have ended."""
        try:
            yield
        finally:
            # A child that was forked while the loop ran may come here with it.
            if os.getpid() == self._pid:
                self.ended = True
                _standing.discard(self)
                await self._close()

    def close_soon(self) -> None:
        """Close idle connections; called by the loop itself."""
        # In a task, because redis-py's connections are closed in one.
        self._closing = self.loop.create_task(self._close())

    async def _close(self) -> None:
        while self._idle:
            drop(self._idle.pop())
        for closer in self._closers:
            closer()
        if self._maker.sentinels is not None:
            for sentinel in self._maker.sentinels.sentinels:
                with contextlib.suppress(*FAILURES):
                    await sentinel.aclose()
        # Transports are told of their end in the loop's next turn, those below TLS in the one
        # after that.
        for _ in range(2):
            await asyncio.sleep(0)


class Loops(Generic[C]):
    """The connections of one backend in each event loop of this process.

    Args:
        make: Makes those of a loop that has none yet.
    """

    def __init__(self, make: Callable[[asyncio.AbstractEventLoop], C]) -> None:
        self._make = make
        self._of: dict[asyncio.AbstractEventLoop, C] = {}

    def here(self) -> C:
        """Those of the running loop."""
        loop = asyncio.get_running_loop()
        return self._of.get(loop) or self._first(loop)

    def _first(self, loop: asyncio.AbstractEventLoop) -> C:
        for other in list(self._of):
            if other.is_closed():
                self._of.pop(other, None)
        connections = self._of[loop] = self._make(loop)
        return connections

    def forget(self) -> None:
        """Leave all loops and their connections to the parent; runs in a forked child."""
        self._of = {}

    def close(self) -> None:
        """Close idle connections, soon; from any thread."""
        for loop, connections in self._of.copy().items():
            # Closed by now, or just about to be.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(connections.close_soon)


_standing: set[LoopConnections] = set()
"""Kept until their loop ends, although their backend may be collected before: an open connection
that is collected complains, and rightly so. Those of a parent stay in its child for ever, for a
transport's finalizer there would take its socket out of those that the parent's loop watches."""


def _keep(connections: LoopConnections) -> None:
    for other in _standing.copy():
        if other.loop.is_closed() and other._pid == os.getpid():
            # Closed without a word to its generators.
            _standing.discard(other)
    _standing.add(connections)


def drop(connection: Any) -> None:
    """Close a connection at once, whatever it still owes; never waits, never raises."""
    # A coroutine that is collected after its loop has ended comes here, too: nothing can be
    # closed then, and nobody is left to be told.
    with contextlib.suppress(Exception):
        # Closing alone lets TLS wait for the other side's farewell, for half a minute.
        if connection._writer is not None:
            connection._writer.transport.abort()
        _run(connection.disconnect(nowait=True))


def _run(coroutine: Any) -> None:
    """Carry out what does not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
