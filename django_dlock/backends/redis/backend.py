"""Leases on one Redis server, reached directly, by TLS, a Unix socket, Sentinels or a cluster."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, get_args

from redis import exceptions as errors

from ...exceptions import BackendRefused, BackendUnavailable
from ...lease import (
    Contention,
    Lease,
    LeaseInfo,
    LeasePage,
    LeaseQuery,
    LeaseRequest,
    Outcome,
    ReleaseRequest,
    Renewal,
    RenewalResult,
    Waiter,
)
from ...text.names import plain
from .. import handover_mac
from ..base import (
    AliasOptions,
    BaseLockBackend,
    Capability,
    PendingRenewal,
    RenewalResults,
)
from ..shared.pool import NoSlot
from .commands import Command, Commands, HandoverMessage
from .config import RedisOptions
from .connection import FAILURES, Connection, ErrorReply, NotConfirmed, is_refusal
from .handover import HandoverListener
from .listing import RedisListing
from .lua_source import Script
from .parameters import connection_maker
from .pending import PendingReply
from .pool import ORDINARY, URGENT, Pool
from .processes import Holders
from .questions import ServerQuestions
from .sentinels import Sentinels
from .waiters import read_waiters

R = TypeVar("R")
T = TypeVar("T")

MOST_UNANSWERED = 10_000
"""Unanswered owners remembered; beyond that, as after a long outage, all are forgotten."""


class RedisBackend(ServerQuestions):
    """Every operation is one script: one step for the server, and one round trip."""

    capabilities = frozenset(get_args(Capability))
    own_options = RedisOptions

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        # A little less, so that the socket's own timeout suffices for the deadline of most calls.
        timeout = 0.95 * self.command_timeout
        own = self._own = self.own_options.read(options)
        route = connection_maker(options, own, timeout)
        self._pool = Pool(route, own.max_connections)
        self._sentinels: Sentinels | None = None
        if route.service is not None:
            self._sentinels = Sentinels(route, route.service, timeout, self._moved, self.alias)
        self._commands = Commands(options.key_prefix)
        self._holders = Holders(self._commands.keys)
        self._listener = HandoverListener(self._pool, self._commands.keys, timeout)
        self._listing = RedisListing(options.alias, self._commands.keys, self._ask)
        # Owners whose acquire or release was sent and not answered so far.
        self._unanswered: set[str] = set()

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        listens, was_answered = not self._listener.refused, False

        def build(repeated: bool) -> Command[Any]:
            return self._commands.acquire(request, listens, repeated)

        def use(connection: Connection) -> Lease | Contention:
            nonlocal was_answered
            answer: Lease | Contention
            answer, _ = self._run_for_owner(connection, request.owner, build, deadline)
            was_answered = True
            if isinstance(answer, Lease):
                self._confirm(connection, deadline)
            if isinstance(answer, Lease) or not answer.owner or not request.waits:
                self._unanswered.discard(request.owner)
            if isinstance(answer, Contention):
                return self._with_process(connection, answer, deadline)
            return answer

        try:
            answer = self._call(use, deadline, urgent=False, name=request.name)
        except BackendUnavailable as error:
            error.unsent = not was_answered and request.owner not in self._unanswered
            raise
        if self._sentinels is not None:
            # For locks that are held for less than it takes until the first renewal.
            self._sentinels.watch(every=request.ttl / 3)
        return answer

    def _with_process(self, connection: Connection, met: Contention, deadline: float) -> Contention:
        if (known := self._holders.identified(met)) is not None:
            return known
        command = self._holders.command(met)
        command.read(*connection.run(command, deadline))
        return self._holders.identified(met) or met

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        try:
            message = self._listener.wait(
                request.owner, contention, until=until, interrupted=interrupted
            )
        except FAILURES as error:
            self._unavailable(error, request.name)
        return message and self._handed_over(request, contention, message)

    async def async_wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        try:
            message = await self._listener.async_wait(
                *(request.owner, contention),
                until=until,
                interrupted=interrupted,
                abandoned=partial(self._abandon, request),
            )
        except FAILURES as error:
            self._unavailable(error, request.name)
        return message and self._handed_over(request, contention, message)

    def _handed_over(
        self, request: LeaseRequest, contention: Contention, message: HandoverMessage
    ) -> Lease | None:
        # If a copy of the request may still arrive, ask again, so that the server knows it. If
        # replicas have to confirm the lease, the answer to the next request waits for them.
        if self._own.replicas or request.owner in self._unanswered:
            return None
        lease = self._commands.handed_over(request, contention, message)
        if lease is None:
            return None
        key = handover_mac.key_of(self.options.key_prefix, request.name)
        if self._commands.is_genuine(key, message):
            return lease
        handover_mac.report(key, request.name, self.alias)
        return None

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        command = self._commands.renew(renewals, process)
        if self._sentinels is not None:
            self._sentinels.watch()

        def use(connection: Connection) -> RenewalResults:
            results = command.read(*connection.run(command, deadline))
            if not any(result.outcome == "renewed" for result in results):
                return results
            try:
                self._confirm(connection, deadline)
            except NotConfirmed:
                # The other leases get their results nevertheless.
                return [
                    RenewalResult("unanswered") if result.outcome == "renewed" else result
                    for result in results
                ]
            return results

        answers = self._call(use, deadline, urgent=True)
        for renewal, answer in zip(renewals, answers, strict=True):
            if renewal.shorten and answer.outcome == "renewed":
                self._ask_again(renewal.name, deadline)
        return answers

    def _ask_again(self, name: str, deadline: float) -> None:
        """Tell the waiters of a lease that ends earlier now; they sleep until the end they know."""
        command = self._commands.ask_again(name)

        def use(connection: Connection) -> None:
            command.read(*connection.run(command, deadline))

        # The renewal is done, whether they hear of it or not.
        with contextlib.suppress(BackendUnavailable):
            self._call(use, deadline, urgent=True, name=name)

    def start_renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> PendingRenewal:
        def on_a_thread() -> PendingRenewal:
            return BaseLockBackend.start_renew(self, renewals, process=process, deadline=deadline)

        # If a connection is idle, no thread is needed, unless more than one command is.
        alone = self._own.replicas or any(renewal.shorten for renewal in renewals)
        taken = None if alone else self._pool.take_idle()
        if taken is None:
            return on_a_thread()
        if self._sentinels is not None:
            self._sentinels.watch()
        command = self._commands.renew(renewals, process)
        return PendingReply(self._pool, taken, command, deadline, repeat=on_a_thread)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        command = self._commands.release(name, owner, min_hold)

        def use(connection: Connection) -> Outcome:
            outcome, repeated = self._run_for_owner(connection, owner, lambda _: command, deadline)
            self._unanswered.discard(owner)
            return _end(outcome, repeated)

        return self._call(use, deadline, urgent=True, name=name)

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        if not releases:
            return []
        commands = [self._commands.release(*release) for release in releases]
        attempts = itertools.count()

        def use(connection: Connection) -> list[Outcome]:
            repeated = next(attempts) > 0
            replies = connection.run_all(commands, deadline)
            return [
                _end(command.read(reply, 0.0), repeated)
                for command, reply in zip(commands, replies, strict=True)
            ]

        return self._call(use, deadline, urgent=True)

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        self._run(self._commands.cancel_acquire(request), deadline, urgent=True)
        self._unanswered.discard(request.owner)

    def locked(self, name: str, *, deadline: float) -> bool:
        return self._run(self._commands.locked(name), deadline)

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        name = plain(name)
        return self._listing.get(name)

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        return self._listing.get_many(names)

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        return self._listing.page(query, offset=offset, limit=limit)

    def waiters(self, name: str, *, limit: int = 100) -> list[Waiter]:
        return read_waiters(self.alias, self._commands.keys, self._ask, name, limit)

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        name = plain(name)
        deadline = deadline or self.call_deadline()
        return self._run(self._commands.break_(name, owner), deadline, urgent=True)

    def deregister(self, process: str, *, deadline: float) -> None:
        self._run(self._commands.deregister(process), deadline, urgent=True)

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        # Finalizers close only the child's own descriptors, without a message to the server.
        self._pool.forget()
        self._listener.after_fork()
        if self._sentinels is not None:
            self._sentinels.after_fork()
        self._unanswered.clear()

    def close_unused(self) -> None:
        self._pool.close_unused()

    def close(self) -> None:
        self._pool.close()
        self._listener.close()
        if self._sentinels is not None:
            self._sentinels.close()

    # -- inside ------------------------------------------------------------------------

    def _ask(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int],
        read: Callable[[Any, float], T],
        name: str = "",
    ) -> T:
        return self._run(Command(script, keys, args, read, name), self.call_deadline())

    def _run(self, command: Command[T], deadline: float, *, urgent: bool = False) -> T:
        reply, sent_at = self._call(
            lambda one: one.run(command, deadline), deadline, urgent=urgent, name=command.name
        )
        return command.read(reply, sent_at)

    def _call(
        self, use: Callable[[Connection], R], deadline: float, *, urgent: bool, name: str = ""
    ) -> R:
        try:
            return self._pool.call(use, deadline, URGENT if urgent else ORDINARY)
        except NoSlot as none:
            raise none.unavailable(name, self.alias) from none
        except FAILURES as error:
            self._unavailable(error, name)

    def _run_for_owner(
        self,
        connection: Connection,
        owner: str,
        build: Callable[[bool], Command[T]],
        deadline: float,
    ) -> tuple[T, bool]:
        """Run a command about this owner; also tell whether one was sent and not answered before.

        If so, a copy may still be under way after this one. The caller then forgets the owner when
        that no longer matters.
        """
        repeated = owner in self._unanswered
        if len(self._unanswered) >= MOST_UNANSWERED:
            self._unanswered.clear()
        self._unanswered.add(owner)
        try:
            command = build(repeated)
            answer = command.read(*connection.run(command, deadline))
        except ErrorReply:
            if not repeated:
                self._unanswered.discard(owner)
            raise
        if not repeated:
            self._unanswered.discard(owner)
        return answer, repeated

    def _moved(self) -> None:
        """Another server is the master now: leave the old one, and renew all leases there."""
        self._pool.close()
        self._listener.leave()
        self.report_doubt()

    def _confirm(self, connection: Connection, deadline: float) -> None:
        """Wait for the replicas, if a grant or a renewal only counts with them."""
        if self._own.replicas:
            connection.confirm(self._own.replicas, deadline)

    def _unavailable(self, error: BaseException, name: str = "") -> NoReturn:
        refused = is_refusal(error)
        what = "Redis refused the command" if refused else "Redis gave no answer"
        if isinstance(error, NotConfirmed):
            what = "The replicas of Redis did not answer"
        # These are in the replies to commands that are sent without a password.
        without = any(word in str(error) for word in ("NOAUTH", "unauthenticated"))
        if without or isinstance(error, errors.AuthenticationError):
            what += f" (user or password of DLOCKS[{self.alias!r}] is wrong or missing)"
        kind = BackendRefused if refused else BackendUnavailable
        raise kind(f"{what}: {error}", name, self.alias) from error


def _end(outcome: Outcome, repeated: bool) -> Outcome:
    # Its release can have been forgotten only if an earlier attempt made it.
    return "refused" if outcome == "unknown" and not repeated else outcome
