"""Leases on one Redis server, reached directly, through TLS, a Unix socket or Sentinels."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from redis import exceptions as errors

from .. import clock
from ..exceptions import BackendUnavailable
from ..lease import (
    Contention,
    Fate,
    Lease,
    LeaseInfo,
    LeasePage,
    LeaseQuery,
    LeaseRequest,
    Renewal,
)
from .base import AliasOptions, BaseLockBackend, Fates, PendingRenewal
from .redis_async import METHODS, RedisCoroutines
from .redis_commands import RENEWALS_PER_CALL, Command, Commands, text
from .redis_connections import FAILURES, RedisConnections
from .redis_listing import RedisListing
from .redis_lua import Script
from .redis_mailbox import Mailbox, asks_again_at
from .redis_parameters import Makers, connection_makers
from .redis_sent import Pending, Repeated, Sent
from .redis_talk import ByClient, ByConnection, Talk

__all__ = ["RedisBackend"]

T = TypeVar("T")

HANDED_KNOWN = 64
"""Leases of which it is known that others waited for the same name."""


class RedisBackend(BaseLockBackend):
    """Every operation is one script, so one step for the server and one round trip for us."""

    supports_wakeup = True
    supports_listing = True

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        # A little less, so that a socket's own timeout keeps the deadline of most calls.
        timeout = 0.95 * self.command_timeout
        makers = connection_makers(options, timeout)
        connections = self._connections = RedisConnections(
            makers.for_threads, timeout, makers.limit, makers.spin
        )
        self._talk: Talk = (
            ByConnection(connections.read)
            if makers.client_kwargs is None
            else ByClient(connections.read, makers.client_kwargs)
        )
        self._commands = Commands(options.key_prefix, self.command_timeout)
        self._mailbox = Mailbox(self._connections, self._commands.keys, timeout)
        self._listing = RedisListing(options.alias, self._commands.keys, self._ask, self._ask_ahead)
        self._coroutines = self._native(makers)
        # What those will release with who were handed a lease. Each step upon it is atomic by
        # itself, as those upon a mailbox's dictionaries; one that is pushed out is packed anew.
        self._handed: collections.OrderedDict[str, Command[Fate]] = collections.OrderedDict()

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        return self._run(self._commands.acquire(request, self._mailbox.number), deadline)

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        # Made while there is nothing else to do: it is what others will wait for.
        release = self._commands.release(request.name, request.owner, 0.0)
        try:
            letter = self._mailbox.wait(
                request.owner,
                contention,
                until=min(until, asks_again_at(contention)),
                deadline=deadline,
                interrupted=interrupted,
            )
        except FAILURES as error:
            self._unavailable(error, request.name)
        if letter is None:
            return None
        release.handed_at = letter.read_at
        self._handed[request.owner] = release
        try:
            while len(self._handed) > HANDED_KNOWN:
                self._handed.popitem(last=False)
        except KeyError:
            pass  # Other threads took them out meanwhile.
        return self._commands.handed(request, contention, letter)

    def renew(self, renewals: Sequence[Renewal], *, process: str, deadline: float) -> Fates:
        fates: Fates = []
        for start in range(0, max(1, len(renewals)), RENEWALS_PER_CALL):
            chunk = renewals[start : start + RENEWALS_PER_CALL]
            renewed = self._run(self._commands.renew(chunk, process), deadline, urgent=True)
            fates += renewed
        return fates

    def start_renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> PendingRenewal:
        def on_a_thread() -> PendingRenewal:
            return BaseLockBackend.start_renew(self, renewals, process=process, deadline=deadline)

        if len(renewals) > RENEWALS_PER_CALL:
            return on_a_thread()
        return self._send(lambda: self._commands.renew(renewals, process), deadline, on_a_thread)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Fate:
        command = self._handed.pop(owner, None)
        if command is None or min_hold or command.name != name:
            handed_at = command.handed_at if command else 0.0
            command = self._commands.release(name, owner, min_hold, handed_at=handed_at)
        return self._run(command, deadline, urgent=True)

    def undo(self, request: LeaseRequest, *, deadline: float) -> None:
        self._run(self._commands.undo(request), deadline, urgent=True)

    def locked(self, name: str, *, deadline: float) -> bool:
        return self._run(self._commands.locked(name), deadline)

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        return self._listing.get(name)

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        return self._listing.page(query, offset=offset, limit=limit)

    def break_(self, name: str, *, owner: str, reason: str = "broken") -> bool:
        return self._run(self._commands.break_(name, owner), self.call_deadline(), urgent=True)

    def last_end(self, name: str) -> tuple[str, Fate] | None:
        return self._run(self._commands.last_end(name), self.call_deadline())

    def goodbye(self, process: str, *, deadline: float) -> None:
        self._run(self._commands.goodbye(process), deadline, urgent=True)

    def eviction_policy(self) -> str | None:
        deadline = self.call_deadline()

        def talk(connection: Any) -> Any:
            # Not CONFIG GET, which hosted servers refuse.
            return self._talk.say(connection, "INFO", "memory", deadline=deadline)

        try:
            lines = text(self._connections.call(talk, deadline=deadline)).splitlines()
        except FAILURES as error:
            self._unavailable(error)
        memory = dict(line.split(":", 1) for line in lines if ":" in line)
        policy = memory.get("maxmemory_policy", "noeviction")
        # Every lock has a TTL, so that "volatile-..." takes locks, too.
        limited = memory.get("maxmemory", "0") != "0"
        return policy if limited and policy != "noeviction" else None

    # -- coroutines --------------------------------------------------------------------

    async def acall(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._coroutines is None or method not in METHODS:
            return await super().acall(method, *args, **kwargs)
        return await getattr(self._coroutines, method)(*args, **kwargs)

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._connections.forget()
        self._mailbox.forget()
        self._handed.clear()
        if self._coroutines is not None:
            self._coroutines.after_fork()

    def close(self) -> None:
        self._connections.close()
        self._mailbox.close()
        if self._coroutines is not None:
            self._coroutines.close()

    # -- inside ------------------------------------------------------------------------

    def _native(self, makers: Makers) -> RedisCoroutines | None:
        """What coroutines use; ``None`` where only threads can connect as the alias asks."""
        if makers.for_loop is None:
            return None
        return RedisCoroutines(
            makers.for_loop,
            makers.limit,
            self._commands,
            command_timeout=self.command_timeout,
            unavailable=self._unavailable,
        )

    def _ask(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int | bytes],
        *,
        name: str = "",
    ) -> Any:
        return self._run(Command.of(script, keys, args, _as_it_is, name), self.call_deadline())

    def _ask_ahead(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int | bytes]
    ) -> Pending[Any]:
        command, deadline = Command.of(script, keys, args, _as_it_is), self.call_deadline()
        # One deadline for both attempts.
        return self._send(
            lambda: command, deadline, lambda: Repeated(lambda: self._run(command, deadline))
        )

    def _send(
        self,
        command: Callable[[], Command[T]],
        deadline: float,
        otherwise: Callable[[], Pending[T]],
    ) -> Pending[T]:
        """Without waiting for its answer, if a connection is idle; redis-py's client cannot."""
        place = None if isinstance(self._talk, ByClient) else self._connections.idle()
        if place is None:
            return otherwise()
        return Sent(
            self._connections,
            place,
            command(),
            deadline,
            repeat=otherwise,
            unavailable=self._unavailable,
        )

    def _run(self, command: Command[T], deadline: float, *, urgent: bool = False) -> T:
        sent_at = 0.0

        def talk(connection: Any) -> Any:
            nonlocal sent_at
            sent_at = clock.now()
            try:
                return self._talk.run(connection, command, deadline)
            except errors.NoScriptError:
                sent_at = clock.now()
                keys, args = command.words()
                words = "EVAL", command.script.source, len(keys), *keys, *args
                return self._talk.say(connection, *words, deadline=deadline)

        try:
            answer = self._connections.call(talk, deadline=deadline, urgent=urgent)
        except FAILURES as error:
            self._unavailable(error, command.name)
        return command.read(answer, sent_at)

    def _unavailable(self, error: BaseException, name: str = "") -> NoReturn:
        refused = isinstance(error, errors.ResponseError | errors.AuthenticationError)
        what = "Redis refused the command" if refused else "Redis gave no answer"
        # The latter is what a server with a password says to a long command without one.
        if isinstance(error, errors.AuthenticationError) or "unauthenticated" in str(error):
            what += f" (user or password of DLOCKS[{self.alias!r}] is wrong or missing)"
        raise BackendUnavailable(f"{what}: {error}", name, self.alias) from error


def _as_it_is(answer: Any, sent_at: float) -> Any:
    return answer
