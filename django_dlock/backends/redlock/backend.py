"""Leases held by a majority of independent Redis servers.

A lease counts if a majority of the nodes has granted it. Any two majorities have a node in common,
so two owners never hold the same name as long as no node forgets what it has granted.

* Every command goes to all nodes at the same time, and is decided as soon as a majority agrees.
  Later answers change nothing. But if the nodes did not agree, each node that has granted, or may
  still grant, is told to withdraw its grant.
* The lease counts from before the first request, and is shortened by as much as the nodes' clocks
  may drift apart.
* The token is the highest one of those that granted. A majority must store it before the grant
  counts, so that the next grant, which needs one of these nodes, has a higher one.
* A node that was restarted or flushed may have forgotten leases. It grants nothing until all of
  them are over; see ``scripts``.
* Commands that withdraw or end a lease are kept for a node that cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from ... import clock
from ...exceptions import BackendRefused, BackendUnavailable, QuorumNotReached
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
    Waiter,
)
from ...text.names import plain
from ..base import (
    AliasOptions,
    BaseLockBackend,
    Capability,
    Fact,
    PendingRenewal,
    Problem,
    RenewalResults,
)
from ..redis.commands import Ask, Command, Commands, as_it_is
from ..redis.config import RedisOptions
from ..redis.connection import is_refusal
from ..redis.listing import RedisListing
from ..redis.parameters import connection_maker
from ..redis.processes import Holders
from ..redis.waiters import read_waiters
from . import config, listing, servers
from .broadcast import PENDING, Answers, Broadcast, Decided
from .exchange import Exchange
from .link import Link, connect
from .node import Job, Node
from .scripts import KEPT_OUT, RAISE_TOKEN, WITHDRAW
from .tries import Tries
from .votes import Votes

Build = Callable[[Link], Command[Any]]


class RedlockBackend(BaseLockBackend):
    """See the module."""

    # Not "wakeup": waiters of several nodes would be woken in several orders. Not "parking" and
    # "reservations": their leases may last longer than a restarted node is kept out.
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {"listing", "memory_of_ends", "min_hold"}
    )
    own_options = config.RedlockOptions

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        own = self.own_options.read(options)
        self.max_ttl = own.max_ttl
        # Also for the backends that ask what a node says of itself.
        arguments = own.connection_kwargs or {}
        self._one_node = [
            replace(options, location=url, options={"connection_kwargs": arguments})
            for url in options.location or ()
        ]
        of_each = RedisOptions(connection_kwargs=arguments)
        # A little less, so that a call can still be answered after a node was given up.
        timeout = 0.95 * self.command_timeout
        self._nodes = [
            Node(
                config.address(str(one.location)),
                partial(
                    connect,
                    connection_maker(one, of_each, timeout),
                    timeout,
                    one.key_prefix,
                    self.max_ttl,
                ),
                timeout,
                self._is_twice,
            )
            for one in self._one_node
        ]
        self._votes = Votes(len(self._nodes), own.clock_drift)
        self._exchange = Exchange(self._nodes)
        self._tries = Tries()
        # For what any node may carry out at any time; other commands are made for each node.
        self._commands = Commands(options.key_prefix)
        self._holders = Holders(self._commands.keys)

    def _is_twice(self, node: Node, run_id: str) -> bool:
        links = [other.link for other in self._nodes if other is not node]
        return any(link is not None and link.run_id == run_id for link in links)

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        asked_at, votes = clock.now(), self._votes
        request = request._replace(ttl=min(request.ttl, self.max_ttl))

        number = self._tries.number(request.owner)

        def ask(link: Link) -> Command[Any]:
            return link.acquire(request, number)

        answers: Answers = []
        jobs: list[Job] = []
        lease: Lease | None = None
        in_doubt = True
        try:
            sent = self._send(ask, votes.acquire_decided, deadline, jobs=jobs)
            answers = sent.wait(deadline - clock.now())
            grants = votes.grants(answers)
            if len(grants) >= votes.quorum:
                token, ttl = max(grant.token for grant in grants), votes.certain(request.ttl)
                stored = self._ask(self._raise_token(request, token), votes.raised, deadline)
                if not votes.has_quorum(stored):
                    raise self._not_reached(stored, request.name)
                if not votes.raised(stored) or clock.now() >= asked_at + ttl:
                    text = "The nodes granted it, but took longer than the lease"
                    raise QuorumNotReached(text, request.name, self.alias)
                lease = Lease(request.name, request.owner, token, ttl, asked_at)
                self._tries.end(request.owner)
                return lease
        finally:
            if lease is None:
                in_doubt = self._withdraw(request, number, answers, jobs)
        contention = votes.contention(answers)
        if contention is None:
            error = self._not_reached(answers, request.name)
            error.unsent = not in_doubt
            raise error
        known = self._holders.identified(contention)
        if known is None:
            question = self._same(self._holders.command(contention))

            def decided(answers: Sequence[Any]) -> bool:
                return self._holders.knows(contention) or votes.has_quorum(answers)

            self._ask(question, decided, deadline)
            known = self._holders.identified(contention)
        return known or contention

    def _raise_token(self, request: LeaseRequest, token: int) -> Build:
        keys = self._commands.keys
        command: Command[Any] = Command(
            RAISE_TOKEN,
            [keys.locks + request.name, keys.index, keys.clock],
            [request.name, request.owner, token],
            as_it_is,
            request.name,
        )
        return self._same(command)

    def _withdraw(
        self, request: LeaseRequest, number: int, answers: Answers, jobs: Sequence[Job]
    ) -> bool:
        """Withdraw what some nodes have granted, or may still grant; waits for none of them.

        Returns:
            Whether there is such a node.
        """
        refused = [
            isinstance(answer, Contention)
            or (isinstance(answer, BaseException) and not job.was_sent)
            for answer, job in zip(answers, jobs, strict=bool(answers))
        ]
        if answers and all(refused):
            return False
        self._tries.withdraw(request.owner, number, request.ttl)
        keys = self._commands.keys
        command: Command[Any] = Command(
            WITHDRAW,
            [keys.locks + request.name, keys.index, keys.tries + request.owner],
            [request.name, request.owner, number],
            as_it_is,
            request.name,
        )
        until = clock.now() + request.ttl
        self._send(self._same(command), lambda answers: True, until, keep=True, but=refused)
        return True

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        return self.start_renew(renewals, process=process, deadline=deadline).result()

    def start_renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> PendingRenewal:
        capped = [one._replace(ttl=min(one.ttl, self.max_ttl)) for one in renewals]
        command = self._commands.renew(capped, process)
        sent = self._send(self._same(command), self._votes.renewals_decided, deadline)
        return _PendingVotes(self, sent, deadline)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        return self.release_many([ReleaseRequest(name, owner, min_hold)], deadline=deadline)[0]

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        sent = [self._release(one, deadline) for one in releases]
        answers = [one.wait(deadline - clock.now()) for one in sent]
        return [
            self._released(votes, one.name) for votes, one in zip(answers, releases, strict=True)
        ]

    def _release(self, one: ReleaseRequest, deadline: float) -> Broadcast:
        command = self._commands.release(*one)
        until = clock.now() + self.max_ttl
        return self._send(self._same(command), self._votes.release_decided, until, keep=True)

    def _released(self, answers: Answers, name: str) -> Outcome:
        if not self._votes.has_quorum(answers):
            raise self._not_reached(answers, name)
        # A majority says that this owner no longer has it. Only the nodes that have not answered
        # know whether it had it until now.
        return self._votes.outcome(answers, "released") or "unknown"

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        self._tries.end(request.owner)
        request = request._replace(ttl=min(request.ttl, self.max_ttl))
        command = self._commands.cancel_acquire(request)
        until = clock.now() + request.ttl
        self._settled(
            self._send(self._same(command), self._votes.has_quorum, until, keep=True), deadline
        )

    def locked(self, name: str, *, deadline: float) -> bool:
        answers = self._ask(
            lambda link: link.commands.locked(name), self._votes.locked_decided, deadline
        )
        if not self._votes.has_quorum(answers):
            raise self._not_reached(answers, name)
        return self._votes.locked(answers)

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        name = plain(name)
        return self.get_many([name]).get(name)

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        keys, votes = self._commands.keys, self._votes
        about = names[0] if len(names) == 1 else ""
        if not names:
            return {}
        asks = map(self._ask_node, range(len(self._nodes)))
        listings = [RedisListing(self.alias, keys, ask) for ask in asks]

        def of(name: str, answers: Sequence[Any]) -> list[Any]:
            return [one.get(name) if isinstance(one, dict) else one for one in answers]

        def decided(answers: Sequence[Any]) -> bool:
            return all(votes.lease_decided(of(name, answers)) for name in names)

        sent = listing.ask_all([partial(one.get_many, names) for one in listings], decided)
        answers = self._settled(sent, self.call_deadline(), about)
        found = ((name, votes.lease(of(name, answers))) for name in names)
        return {name: info for name, info in found if info is not None}

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        nodes = [self._ask_node(number) for number in range(len(self._nodes))]
        keys, votes = self._commands.keys, self._votes
        found = listing.page(self.alias, keys, nodes, votes, query, offset=offset, limit=limit)
        if isinstance(found, LeasePage):
            return found
        raise self._not_reached(found, "")

    def waiters(self, name: str, *, limit: int = 100) -> list[Waiter]:
        asks, keys = map(self._ask_node, range(len(self._nodes))), self._commands.keys
        reads = [partial(read_waiters, self.alias, keys, ask, name, limit) for ask in asks]
        sent = listing.ask_all(reads, self._votes.has_quorum)
        answers = self._settled(sent, self.call_deadline(), name)
        return self._votes.waiters(answers)[: max(0, limit)]

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        name = plain(name)
        command, until = self._commands.break_(name, owner), clock.now() + self.max_ttl
        sent = self._send(self._same(command), self._votes.has_quorum, until, keep=True)
        answers = self._settled(sent, deadline or self.call_deadline(), name)
        return any(answer is True for answer in answers)

    def deregister(self, process: str, *, deadline: float) -> None:
        command = self._commands.deregister(process)
        self._settled(self._send(self._same(command), self._votes.has_quorum, deadline), deadline)

    def store_problems(self) -> Sequence[Problem]:
        return list(servers.problems(self._servers()))

    def facts(self, *, deadline: float) -> Sequence[Fact]:
        quorum = Fact("quorum", f"{self._votes.quorum} of {len(self._nodes)} nodes")
        return [quorum, *servers.facts(self._servers(), deadline, self.max_ttl)]

    def _servers(self) -> list[tuple[str, AliasOptions]]:
        return list(zip((node.address for node in self._nodes), self._one_node, strict=True))

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._exchange.after_fork()

    def close(self) -> None:
        self._exchange.close()

    # -- inside ------------------------------------------------------------------------

    @staticmethod
    def _same(command: Command[Any]) -> Build:
        return lambda link: command

    def _send(
        self,
        build: Build,
        decided: Decided,
        until: float,
        *,
        keep: bool = False,
        but: Sequence[bool] = (),
        jobs: list[Job] | None = None,
    ) -> Broadcast:
        """Send a command to all nodes.

        Args:
            but: Which nodes to leave out; empty for none.
            jobs: Gets the job of each node.
        """
        sent = Broadcast(len(self._nodes), decided)
        pairs = [
            (node, Job(build, partial(sent.put, number), until, keep=keep))
            for number, node in enumerate(self._nodes)
            if not (but and but[number])
        ]
        if jobs is not None:
            jobs += [job for _, job in pairs]
        self._exchange.submit(pairs, lambda: sent.is_decided)
        return sent

    def _ask(self, build: Build, decided: Decided, deadline: float) -> Answers:
        """Send a command to all nodes, and wait until enough of them have answered."""
        return self._send(build, decided, deadline).wait(deadline - clock.now())

    def _ask_node(self, number: int) -> Ask:
        return lambda *words: self._ask_one(number, lambda link: link.guarded(*words))

    def _ask_one(self, number: int, build: Build) -> Any:
        """Run a script on one node.

        Raises:
            redis.exceptions.RedisError, OSError: No answer.
        """
        sent, deadline = Broadcast(1, lambda answers: True), self.call_deadline()
        job = Job(build, partial(sent.put, 0), deadline, keep=False)
        self._exchange.submit([(self._nodes[number], job)], lambda: sent.is_decided)
        (answer,) = sent.wait(deadline - clock.now())
        if answer is PENDING:
            raise TimeoutError("no reply within the time allowed")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _settled(self, sent: Broadcast, deadline: float, name: str = "") -> Answers:
        """Wait for the answers of a quorum.

        Raises:
            QuorumNotReached: Too few have answered.
        """
        answers = sent.wait(deadline - clock.now())
        if not self._votes.has_quorum(answers):
            raise self._not_reached(answers, name)
        return answers

    def _not_reached(self, answers: Sequence[Any], name: str) -> BackendUnavailable:
        """The error that says which nodes have not answered, and why."""
        silent: list[str] = []
        refusals: list[BaseException] = []
        cause: BaseException | None = None
        for node, answer in zip(self._nodes, answers, strict=True):
            if answer is PENDING:
                silent.append(f"{node.address}: no reply within the time allowed")
            elif isinstance(answer, BaseException):
                silent.append(f"{node.address}: {answer}")
                cause = answer
                if is_refusal(answer) and not _is_kept_out(answer):
                    refusals.append(answer)
        what = f"{len(silent)} of {len(answers)} nodes gave no vote ({'; '.join(silent)})"
        if len(refusals) > len(answers) - self._votes.quorum:
            # They will not vote until someone changes them or the settings.
            refused = BackendRefused(what, name, self.alias)
            refused.__cause__ = cause
            return refused
        error = QuorumNotReached(what, name, self.alias)
        error.__cause__ = cause
        return error


def _is_kept_out(error: BaseException) -> bool:
    return getattr(error, "code", "") == KEPT_OUT


class _PendingVotes:
    """A ``PendingRenewal`` at all nodes."""

    def __init__(self, backend: RedlockBackend, sent: Broadcast, deadline: float) -> None:
        self._backend, self._sent, self._deadline = backend, sent, deadline

    def wait(self, timeout: float) -> bool:
        self._sent.wait(timeout)
        return self._sent.is_decided

    def result(self) -> RenewalResults:
        answers = self._backend._settled(self._sent, self._deadline)
        return self._backend._votes.renewals(answers)

    def abandon(self) -> None:
        """Later answers are ignored; nothing is held for them."""
