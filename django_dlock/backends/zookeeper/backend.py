"""Leases as ephemeral nodes in ZooKeeper.

::

    /dlock/3f/<digest of the name>-<owner>

* The node that was created first, by its ``czxid``, holds the name; ``czxid`` is the token too.
* The path contains the owner. So a repeated request finds the node of the first one, and every
  deletion names the owner.
* Every grant and every renewal is confirmed by a write, which needs a majority of the servers, and
  is good for half the time that the servers keep a silent session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from kazoo.exceptions import NodeExistsError, NoNodeError

from ... import clock
from ...exceptions import BackendUnavailable
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
from ..base import AliasOptions, BaseLockBackend, Fact, Problem, RenewalResults
from . import status
from .attempts import Attempt, Attempts
from .calls import SessionCalls
from .config import ZooKeeperOptions, root_of
from .listing import ZooKeeperListing
from .nodes import LockNode, content, contents, node_of, other_nodes, path_of, queue, still_there
from .session import Session
from .watches import Watches


class ZooKeeperBackend(BaseLockBackend):
    """One session per process, which shows that it lives; see the module."""

    capabilities = frozenset({"listing", "memory_of_ends", "wakeup"})
    heartbeat = None
    own_options = ZooKeeperOptions
    # Each lease is one request, even if all of them are sent at once.
    renewals_per_call = 100

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._root = root_of(options)
        self._own = self.own_options.read(options)
        self._sessions = SessionCalls(options, self._own, self._listen)
        self._closing = False
        self._attempts = Attempts(self._delete_expired)
        self._watches = Watches()
        self._listing = ZooKeeperListing(options, self._sessions, self._own_remaining)

    def store_problems(self) -> list[Problem]:
        granted = self._sessions.call(lambda session: session.timeout, "", self.call_deadline())
        return status.problems(self.options, granted, self._own.session)

    def facts(self, *, deadline: float) -> list[Fact]:
        def ask(session: Session) -> list[Fact]:
            return status.facts(session.ask_status(status.COMMAND), session.timeout)

        return self._sessions.call(ask, "", deadline)

    # -- acquire -----------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        path = self._path(request.name, request.owner)

        def step(session: Session) -> Lease | Contention | None:
            asked_at = clock.now()
            attempt = self._attempts.begin(request, path)
            if attempt is None:
                return Contention("", "held", 0.0, time.time())
            if attempt.session != session.id:
                now = self._join(session, attempt, request, deadline)
                if isinstance(now, Contention):
                    return now
            else:
                now = self._check_again(session, attempt, deadline)
            if now is None or attempt.ahead is None:
                return None
            if not attempt.ahead:
                ttl = min(request.ttl, session.validity)
                return self._attempts.grant(attempt, session, asked_at, ttl)
            if not request.waits:
                # Not forgotten before its node is gone, or nobody would cancel it.
                session.delete(path, deadline)
                self._attempts.drop(attempt)
            return self._contention(attempt.ahead, now)

        try:
            # mypy infers what the two named tuples have in common.
            return cast("Lease | Contention", self._sessions.repeat(step, request.name, deadline))
        except BackendUnavailable as error:
            error.unsent = self._attempts.drop_unsent(request.owner)
            raise

    def _join(
        self, session: Session, attempt: Attempt, request: LeaseRequest, deadline: float
    ) -> float | Contention | None:
        """Create the node, and see who came before; ``None`` to try again."""
        directory, client = attempt.path.rpartition("/")[0], session.client
        if not request.waits:
            # A caller that will not wait must not block others even for a moment.
            beat, listed = session.beat(), client.get_children_async(directory)
            now = session.answer(beat, deadline).last_modified
            nodes = session.answer_or_none(listed, deadline) or []
            others = other_nodes(session, attempt.name, nodes, deadline, but=attempt.owner)
            if others and node_of(attempt.path) not in nodes:
                self._attempts.drop(attempt)
                return self._contention(others, now)
        data = attempt.data = content(request, min(request.ttl, session.validity), session.timeout)
        created = self._attempts.create(attempt, lambda: session.create(attempt.path, data))
        if created is None:
            return None
        listed = client.get_children_async(directory)
        try:
            _, state = session.answer(created, deadline)
        except NoNodeError:
            with suppress(NodeExistsError):
                session.answer(client.create_async(directory), deadline)
            return None
        except NodeExistsError:
            # An earlier request, whose answer was lost, has created it.
            state = session.answer_or_none(client.exists_async(attempt.path), deadline)
            if state is None:
                return None
        if state.ephemeralOwner != session.id:
            # It belongs to an earlier session of this process, and would end with it.
            session.delete(attempt.path, deadline)
            return None
        nodes = session.answer(listed, deadline)
        others = other_nodes(session, attempt.name, nodes, deadline, but=attempt.owner)
        self._attempts.join(attempt, session, state, others)
        return float(state.created)

    def _check_again(self, session: Session, attempt: Attempt, deadline: float) -> float | None:
        """See who of those ahead is still there; ``None`` to try again."""
        directory, _, node = attempt.path.rpartition("/")
        # Its own node is written, so that it says when it was granted; a majority must confirm it.
        written = session.client.set_async(attempt.path, attempt.data)
        listed = session.client.get_children_async(directory)
        state = session.answer_or_none(written, deadline)
        present = set(session.answer_or_none(listed, deadline) or ())
        if state is None or node not in present:
            if attempt.until:
                self._attempts.end(attempt.owner, "broken")
            # Otherwise it was removed from the queue, and joins it again.
            attempt.node_gone()
            return None
        ahead = [other for other in attempt.ahead or [] if node_of(other.path) in present]
        attempt.ahead = still_there(session, ahead, deadline)
        return float(state.last_modified)

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        session, node = self._sessions.session, contention.ticket
        if session is not None and isinstance(node, LockNode):
            owner = request.owner
            self._watches.wait(session, owner, node, until=until, interrupted=interrupted)
        return None

    async def async_wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        session, node = self._sessions.session, contention.ticket
        if session is not None and isinstance(node, LockNode):
            await self._watches.async_wait(
                *(session, request.owner, node),
                until=until,
                interrupted=interrupted,
                abandoned=partial(self._abandon, request),
            )
        return None

    # -- renew and release -------------------------------------------------------------

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        def step(session: Session) -> RenewalResults:
            sent_at, beat = clock.now(), session.beat()
            found = [self._attempts.find(renewal.owner) for renewal in renewals]
            asked = [
                session.client.exists_async(each.path) if isinstance(each, Attempt) else None
                for each in found
            ]
            session.answer(beat, deadline)
            results: RenewalResults = []
            for renewal, attempt, request in zip(renewals, found, asked, strict=True):
                if not isinstance(attempt, Attempt):
                    results.append(RenewalResult(attempt))
                    continue
                if session.answer(request, deadline) is None:
                    self._attempts.end(attempt.owner, "broken")
                ttl = min(renewal.ttl, session.validity)
                results.append(self._attempts.renew(attempt, renewal, sent_at, ttl))
            return results

        outcomes = [self._attempts.find(renewal.owner) for renewal in renewals]
        if any(isinstance(each, Attempt) for each in outcomes):
            return self._sessions.call(step, "", deadline)
        return [RenewalResult(each) for each in outcomes if not isinstance(each, Attempt)]

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        return self.release_many([ReleaseRequest(name, owner)], deadline=deadline)[0]

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        def step(session: Session) -> list[Outcome]:
            asked: list[tuple[str, Any, Outcome]] = []
            missing: Outcome
            for name, owner, _ in releases:
                found, missing = self._attempts.find(owner), "refused"
                if isinstance(found, Attempt):
                    missing = "released" if found.releasing else "broken"
                    found.releasing = True
                elif found != "refused":
                    asked.append((owner, None, found))
                    continue
                request = session.client.delete_async(self._path(name, owner))
                asked.append((owner, request, missing))
            outcomes: list[Outcome] = []
            for owner, request, outcome in asked:
                outcomes.append(outcome)
                if request is not None:
                    with suppress(NoNodeError):
                        session.answer(request, deadline)
                        outcomes[-1] = "released"
                    self._attempts.end(owner, outcomes[-1])
            return outcomes

        if not releases:
            return []
        outcomes = self._sessions.call(step, releases[0].name, deadline)
        self._close_if_idle()
        return outcomes

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        def step(session: Session) -> None:
            session.delete(path, deadline)

        path = self._path(request.name, request.owner)
        # Record its end first: from now on no node is created for it.
        self._attempts.end(request.owner, "released", request.ttl)
        try:
            self._sessions.call(step, request.name, deadline)
        finally:
            self._close_if_idle()

    def _delete_expired(self, attempt: Attempt) -> bool:
        """Runs on the thread that ends leases with their TTL."""

        def step(session: Session) -> None:
            session.delete(attempt.path, deadline)

        deadline = self.call_deadline()
        try:
            self._sessions.call(step, attempt.name, deadline)
        except BackendUnavailable:
            return False
        self._close_if_idle()
        return True

    # -- one lease ---------------------------------------------------------------------

    def locked(self, name: str, *, deadline: float) -> bool:
        def step(session: Session) -> bool:
            return bool(queue(session, name, deadline)[1])

        return self._sessions.call(step, name, deadline)

    def get(self, name: str) -> LeaseInfo | None:
        return self._listing.get(name)

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        return self._listing.page(query, offset, limit)

    def waiters(self, name: str, *, limit: int = 100) -> list[Waiter]:
        return self._listing.waiters(name, limit)

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        asked = False

        def step(session: Session) -> bool:
            nonlocal asked
            _, line = queue(session, name, until)
            if line and line[0].owner == owner:
                reply, asked_before = session.client.delete_async(line[0].path), asked
                asked = True
                try:
                    session.answer(reply, until)
                except NoNodeError:
                    asked = asked_before
            elif any(node.owner == owner for node in line):
                # It waits, so it holds nothing.
                return False
            if not asked:
                return False
            # Also if the node is gone: an earlier call, whose reply was lost, may have deleted it.
            if isinstance(self._attempts.find(owner), Attempt):
                self._attempts.end(owner, "broken")
            return True

        until = deadline or self.call_deadline()
        return self._sessions.call(step, name, until)

    # -- housekeeping ------------------------------------------------------------------

    def deregister(self, process: str, *, deadline: float) -> None:
        """End the session, and with it whatever has not been released."""
        self._end_session(deadline - clock.now())

    def after_fork(self) -> None:
        self._attempts = Attempts(self._delete_expired)
        self._watches.forget()
        self._closing = False
        self._sessions.forget()

    def close(self) -> None:
        # Leases end with their session, so it lasts until the last of them has ended.
        self._closing = True
        self._close_if_idle(self.command_timeout)

    def _close_if_idle(self, patience: float = 0.0) -> None:
        if self._closing and self._attempts.is_idle:
            self._end_session(patience)

    def _end_session(self, patience: float) -> None:
        self._closing = False
        if self._sessions.end(patience):
            self._attempts.end_session()
            self._watches.fire_all()

    def _listen(self, event: str) -> None:
        """Runs on the client's thread."""
        if event == "lost":
            for owner in self._attempts.end_session():
                self.report_end(owner, "expired")
        else:
            self.report_doubt()
        self._watches.fire_all()

    # -- inside ------------------------------------------------------------------------

    def _path(self, name: str, owner: str) -> str:
        return path_of(self._root, name, owner)

    def _contention(self, line: Sequence[LockNode], now: float) -> Contention:
        """The first in line holds the name; the caller waits until the last one is gone."""
        holder = line[0]
        process, left = contents(holder).process, self._remaining(holder)
        return Contention(holder.owner, "held", left, now, process, line[-1])

    def _remaining(self, holder: LockNode) -> float:
        """Seconds until a lease ends; for a lease of another process, an upper limit."""
        own = self._own_remaining(holder.owner)
        return contents(holder).ttl if own is None else own

    def _own_remaining(self, owner: str) -> float | None:
        # A forked child has attempts of its own.
        return self._attempts.remaining(owner)
