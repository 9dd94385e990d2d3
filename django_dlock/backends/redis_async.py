"""Leases on one Redis for coroutines: the commands of the threads, awaited without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from redis import exceptions as errors

from .. import clock
from ..lease import Contention, Fate, Lease, LeaseRequest, Renewal
from .base import Fates
from .redis_async_mailbox import LoopMailbox
from .redis_commands import RENEWALS_PER_CALL, Command, Commands, Keys
from .redis_connections import FAILURES
from .redis_loops import LoopConnections, Loops
from .redis_mailbox import asks_again_at, numbers
from .redis_parameters import LoopMaker

__all__ = ["METHODS", "RedisCoroutines"]

METHODS = frozenset({"acquire", "wait", "renew", "release", "undo", "locked", "break_"})
"""What is awaited here; the rest of a backend is for operators and runs on threads."""

T = TypeVar("T")


class _OfLoop(LoopConnections):
    """What one event loop has of one Redis."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        maker: LoopMaker,
        limit: int,
        keys: Keys,
        timeout: float,
    ) -> None:
        super().__init__(loop, maker, limit)
        self.number = next(numbers)
        self.mailbox = LoopMailbox(self, keys.mailbox(self.number), timeout)


class RedisCoroutines:
    """The twins of some methods of ``RedisBackend``, with its arguments, answers and errors.

    A call that is cancelled drops the connection it used, so that its late reply answers nobody;
    what it may have done, its caller will ``undo``.
    """

    def __init__(
        self,
        for_loop: Callable[[], LoopMaker],
        limit: int,
        commands: Commands,
        *,
        command_timeout: float,
        unavailable: Callable[[BaseException, str], NoReturn],
    ) -> None:
        def make(loop: asyncio.AbstractEventLoop) -> _OfLoop:
            return _OfLoop(loop, for_loop(), limit, commands.keys, command_timeout)

        self._loops = Loops(make)
        self._commands = commands
        self._command_timeout = command_timeout
        self._unavailable = unavailable

    async def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        number = self._loops.here().number
        return await self._run(self._commands.acquire(request, number), deadline)

    async def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        try:
            letter = await self._loops.here().mailbox.wait(
                request.owner,
                contention,
                until=min(until, asks_again_at(contention)),
                interrupted=interrupted,
            )
        except FAILURES as error:
            self._unavailable(error, request.name)
        return None if letter is None else self._commands.handed(request, contention, letter)

    async def renew(self, renewals: Sequence[Renewal], *, process: str, deadline: float) -> Fates:
        fates: Fates = []
        for start in range(0, max(1, len(renewals)), RENEWALS_PER_CALL):
            chunk = renewals[start : start + RENEWALS_PER_CALL]
            renewed = await self._run(self._commands.renew(chunk, process), deadline, urgent=True)
            fates += renewed
        return fates

    async def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Fate:
        command = self._commands.release(name, owner, min_hold)
        return await self._run(command, deadline, urgent=True)

    async def undo(self, request: LeaseRequest, *, deadline: float) -> None:
        await self._run(self._commands.undo(request), deadline, urgent=True)

    async def locked(self, name: str, *, deadline: float) -> bool:
        return await self._run(self._commands.locked(name), deadline)

    async def break_(self, name: str, *, owner: str, reason: str = "broken") -> bool:
        deadline = clock.now() + self._command_timeout
        return await self._run(self._commands.break_(name, owner), deadline)

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._loops.forget()

    def close(self) -> None:
        self._loops.close()

    # -- inside ------------------------------------------------------------------------

    async def _run(self, command: Command[T], deadline: float, *, urgent: bool = False) -> T:
        async def talk(connection: Any) -> tuple[Any, float]:
            sent_at = clock.now()
            await connection.send_packed_command((command.packed,), check_health=False)
            try:
                # Whoever called this drops the connection, which redis-py cannot do for a
                # coroutine whose loop has ended.
                return await connection.read_response(disconnect_on_error=False), sent_at
            except errors.NoScriptError:
                sent_at = clock.now()
                keys, args = command.words()
                words = "EVAL", command.script.source, len(keys), *keys, *args
                await connection.send_command(*words)
                return await connection.read_response(disconnect_on_error=False), sent_at

        try:
            answer, sent_at = await self._loops.here().call(talk, deadline=deadline, urgent=urgent)
        except FAILURES as error:
            self._unavailable(error, command.name)
        return command.read(answer, sent_at)
