"""Leases in a table of the project's database; ``rows.py`` defines what each operation changes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

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
    Waiter,
)
from ...process import ProcessIdentity, current
from ...text.names import plain
from .. import handover_mac
from ..base import AliasOptions, BaseLockBackend, Capability, Fact, Problem, RenewalResults
from .config import DatabaseOptions
from .connection import Connection, Failure
from .listing import DatabaseListing
from .pending_notification import PendingNotification
from .renewal import Renewals
from .rows import MAC, SECOND, Message, Row, WaitInfo, is_dead, micro
from .statements import Found, Released
from .store import Store
from .table import LeaseTable
from .waiting import handed_over, patience, pause

SWEEP_EVERY = 100
"""Acquires of one process between two sweeps."""
SWEEP_ROUNDS = 10
PROBLEMS = {
    "missing": ("E010", "Run that command, also in the deployment."),
    "read-only": ("E011", "Leases must be written where every process writes them."),
}
"""The kind of failure → id and hint of the check."""
PROCESS_MEMORY = 86_400 * SECOND
"""Seconds after its last heartbeat for which the end of a process is remembered."""


class DatabaseBackend(BaseLockBackend):
    """Each operation is one conditional statement, or reads a row and writes it back if unchanged.

    The backend has its own connections, so leases do not depend on the caller's transaction.
    """

    capabilities = frozenset(get_args(Capability))
    own_options = DatabaseOptions

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._own = self.own_options.read(options)
        self._table = LeaseTable(options, self._own)
        self._renewals = Renewals(self._table)
        self._acquires = 0
        self._listing = DatabaseListing(options.alias, options.key_prefix)

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        return self._store.is_shared

    @property
    def _store(self) -> Store:
        return self._table.store

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        queued: list[bool] = []
        try:
            return self._acquire(request, deadline, queued)
        except BackendUnavailable as error:
            error.unsent = not queued and not self._table.is_repeated(request.owner)
            raise

    def _acquire(
        self, request: LeaseRequest, deadline: float, queued: list[bool]
    ) -> Lease | Contention:
        """As ``acquire``; ``queued`` gets an entry once the request may be in the row's queue."""
        process, names = _identity(current()), self._table.names(request.name)
        owner, table = request.owner, self._table

        # Registered before its ticket is stored, so that no notification is missed.
        wakeup = self._store.wakeup
        registration = wakeup.pending(owner) if wakeup is not None and request.waits else None
        channel = registration.channel if registration else ""
        if registration:
            # For the hand-over that follows.
            table.mac_key(request.name)

        def in_one_statement(one: Connection, store: Store, key: Any) -> int | Found:
            if table.is_repeated(owner):
                # The row must remember that a copy may arrive.
                return 0
            asked = (owner, request.kind, micro(request.ttl), process, request.metadata)
            waits = channel if registration and not request.replaces else None
            try:
                return table.send(
                    [owner], lambda: store.dialect.acquire(one, key, names, asked, waits)
                )
            except Failure as error:
                if error.kind == "overtaken":
                    # Reading the row shows who was first.
                    return 0
                raise

        self._keep_session()
        sent_at = clock.now()
        # A name that was waited for is probably still held, and only the longer way extends the
        # ticket.
        tried: int | Found = 0
        if not request.since:
            tried = table.ask(in_one_statement, request.name, deadline)
            if isinstance(tried, int) and tried:
                lease = Lease(request.name, request.owner, tried, request.ttl, sent_at)
                self._sweep_if_due(request.name, deadline)
                return lease
        if registration:
            registration.listen()
        if isinstance(tried, tuple):
            queued.append(True)
            now, row, _ = tried
            # The statement may have waited for the row until the lease had ended. Then its ticket
            # waits for a free name, and the longer way grants the name to it.
            if row.lives(now):
                return self._with_proof(row.contention(owner, now, sent_at, registration))

        # The statement above may have waited long, and the lease counts from here at the earliest.
        sent_at = clock.now()
        seen: list[Contention] = []

        def change(row: Row, now: int) -> tuple[Lease | Contention, list[Message]]:
            # Returned only if the row cannot be written. Then there is no ticket to notify.
            met = row.contention(owner, now, sent_at, None, overtaken=True)
            seen[:] = [] if row.owner == owner else [met]
            repeated = table.is_repeated(owner)
            granted, messages = row.acquire(request, now, process, channel, repeated=repeated)
            if granted:
                return row.lease(request, sent_at), messages
            return self._with_proof(row.contention(owner, now, sent_at, registration)), messages

        def overtaken(in_doubt: bool) -> Contention | None:
            if seen and not request.waits and (request.since or in_doubt):
                # Its ticket may still be in the queue, or the name may have been granted to it,
                # and nobody would use that lease.
                self._abandon(request)
            return seen[0] if seen else None

        answer = table.change(request.name, change, deadline, owner=owner, overtaken=overtaken)
        if isinstance(answer, Lease) or not request.waits:
            table.answered(owner)
        if isinstance(answer, Lease):
            self._sweep_if_due(request.name, deadline)
        return answer

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        registration = cast(WaitInfo, contention.ticket).registration
        if not isinstance(registration, PendingNotification):
            time.sleep(pause(contention, until, self._longest_pause))
            return None
        over = self._or_dead(contention, interrupted)
        heard = registration.wait(patience(contention, until), over)
        return self._handed_over(request, contention, registration.channel, heard)

    async def async_wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        registration = cast(WaitInfo, contention.ticket).registration
        if not isinstance(registration, PendingNotification):
            await asyncio.sleep(pause(contention, until, self._longest_pause))
            return None
        over = self._or_dead(contention, interrupted)
        abandoned = partial(self._abandon, request)
        heard = await registration.async_wait(patience(contention, until), over, abandoned)
        return self._handed_over(request, contention, registration.channel, heard)

    def _handed_over(
        self, request: LeaseRequest, met: Contention, channel: str, payload: str | None
    ) -> Lease | None:
        """The lease that a notification grants; ``None`` if the caller has to ask again."""
        found = None if payload is None else handed_over(request, met, payload)
        # If a copy of the request may arrive, only an acquire can note that in the row.
        if found is None or self._table.is_repeated(request.owner):
            return None
        lease, mac = found
        key = self._table.mac_key(request.name)
        if handover_mac.is_genuine(mac, MAC, key, channel, f"{lease.owner} {lease.token}"):
            return lease
        handover_mac.report(key, request.name, self.alias)
        return None

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        if not renewals and not self._table.is_in_use:
            return []
        self._keep_session()
        return self._renewals.renew(renewals, process=process, deadline=deadline)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        def in_one_statement(one: Connection, store: Store, key: Any) -> Released | None:
            mac_key = table.mac_key(name)
            return table.send([owner], lambda: store.dialect.release(one, key, owner, mac_key))

        table = self._table
        outcome: Outcome = "released"
        done = None if min_hold else table.ask(in_one_statement, name, deadline, "end")
        if done is None:

            def change(row: Row, now: int) -> tuple[Outcome, list[Message]]:
                return row.release(owner, min_hold, now, repeated=table.is_repeated(owner))

            outcome = table.change(name, change, deadline, "end", owner=owner)
        elif done.owner and is_dead(done.process):
            # The statement cannot know that. The next waiter must not wait for the end of the TTL.
            with contextlib.suppress(BackendUnavailable):
                self.break_silently(name, owner=done.owner, deadline=deadline)
        table.answered(owner)
        return outcome

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        def use(one: Connection, store: Store) -> set[tuple[str, str]]:
            asked = [
                (store.dialect.key(self._table.digest(each.name)), each.owner) for each in at_once
            ]
            owners = [each.owner for each in at_once]
            return self._table.send(owners, lambda: store.dialect.release_many(one, asked))

        at_once = [each for each in releases if not each.min_hold]
        freed = self._table.call(use, deadline, "end") if at_once else set()
        dialect = self._store.dialect

        def release(each: ReleaseRequest) -> Outcome:
            key = dialect.text(dialect.key(self._table.digest(each.name)))
            if not each.min_hold and (key, each.owner) in freed:
                self._table.answered(each.owner)
                return "released"
            return self.release(each.name, each.owner, min_hold=each.min_hold, deadline=deadline)

        return [release(each) for each in releases]

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        def change(row: Row, now: int) -> tuple[None, list[Message]]:
            return None, row.cancel(request, now)

        self._table.change(request.name, change, deadline, "end")
        self._table.answered(request.owner)

    def locked(self, name: str, *, deadline: float) -> bool:
        now, row = self._table.read(name, deadline)
        return row is not None and row.lives(now)

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        name = plain(name)

        def use(one: Connection, store: Store, key: Any) -> LeaseInfo | None:
            return self._listing.get(one, store.dialect, key, name)

        return self._table.ask(use, name, self.call_deadline())

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        def use(one: Connection, store: Store) -> Mapping[str, LeaseInfo]:
            return self._listing.get_many(one, store.dialect, names)

        return self._table.call(use, self.call_deadline())

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        def use(one: Connection, store: Store) -> LeasePage:
            return self._listing.page(one, store.dialect, query, offset, limit)

        return self._table.call(use, self.call_deadline())

    def waiters(self, name: str, *, limit: int = 100) -> list[Waiter]:
        now, row = self._table.read(name, self.call_deadline())
        return self._listing.waiters(now, row, name, limit)

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        name = plain(name)

        def change(row: Row, now: int) -> tuple[bool, list[Message]]:
            return row.end_by_break(owner, now)

        def done(row: Row, now: int) -> bool | None:
            return row.outcome_of(owner, now) == "broken" or None

        return self._table.change(name, change, deadline or self.call_deadline(), "end", done=done)

    def deregister(self, process: str, *, deadline: float) -> None:
        def use(one: Connection, store: Store) -> None:
            store.dialect.beat(one, process, gone=True)
            store.dialect.forget_processes(one, PROCESS_MEMORY)

        self._renewals.forget_beat()
        if self._table.is_in_use:
            self._table.call(use, deadline, "end")

    def store_problems(self) -> list[Problem]:
        def use(one: Connection, store: Store, key: Any) -> None:
            store.dialect.read(one, key)
            # This tells whether the user may write, and nearly always deletes nothing.
            store.dialect.forget_processes(one, PROCESS_MEMORY)

        try:
            self._table.ask(use, "", self.call_deadline())
        except BackendUnavailable as error:
            if isinstance(error.__cause__, Failure) and error.__cause__.kind in PROBLEMS:
                check_id, hint = PROBLEMS[error.__cause__.kind]
                return [Problem(check_id, f"{error}.", hint)]
            raise
        return []

    def facts(self, *, deadline: float) -> list[Fact]:
        def use(one: Connection, store: Store, key: Any) -> list[Fact]:
            found = []
            for topic, text, statement in store.dialect.FACTS:
                try:
                    ((value, *_),) = one.rows(statement)
                except Failure as error:
                    if error.kind == "broken":
                        raise
                    # The database user has no right to read it.
                    continue
                found.append(Fact(topic, text.format(value)))
            return found

        # Only PostgreSQL can notify.
        listens = "" if self._store.wakeup is None else ", and one that listens"
        pool = Fact("connections", f"at most {self._own.connections} of each process{listens}")
        return [*self._table.ask(use, "", deadline), pool]

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._table.forget()

    def close_unused(self) -> None:
        self._table.close_unused()

    def close(self) -> None:
        self._table.close()

    def _sweep_if_due(self, name: str, deadline: float) -> None:
        """Delete dead rows after every hundredth grant; a failure must not undo the grant."""
        # Threads may count one too few; that does no harm.
        self._acquires += 1
        if self._acquires % SWEEP_EVERY == 0:
            soon = min(deadline, clock.now() + self.command_timeout / 4)
            with contextlib.suppress(BackendUnavailable):
                self._table.ask(lambda one, store, _: self._sweep(one, store), name, soon)

    def _sweep(self, one: Connection, store: Store) -> None:
        for _ in range(SWEEP_ROUNDS):
            start = store.dialect.key(uuid.uuid4().bytes)
            try:
                examined, dead = store.dialect.sweep(one, start)
            except Failure as error:
                if error.kind == "broken":
                    raise
                return
            if dead * 4 <= examined:
                return

    # -- internals ------------------------------------------------------------------------

    def _keep_session(self) -> None:
        """With ``OPTIONS["proof"]``, keep the session open that proves this process alive."""
        if self._own.proof and (wakeup := self._store.wakeup) is not None:
            wakeup.keep_listening()

    def _is_proven_dead(self, met: Contention) -> bool:
        session = self._store.session
        return session is not None and met.kind == "held" and session.is_dead(met.process)

    def _with_proof(self, met: Contention) -> Contention:
        return met._replace(proven_dead=self._is_proven_dead(met))

    def _or_dead(self, met: Contention, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        """Also end the wait when the holder is proven dead."""
        return lambda: self._is_proven_dead(met) or interrupted()

    @property
    def _longest_pause(self) -> float:
        return self._own.poll_interval


@functools.lru_cache(maxsize=1)
def _identity(process: ProcessIdentity) -> str:
    return json.dumps(process.as_dict(), separators=(",", ":"))
