"""Leases in a table of the project's database; ``rows.py`` defines what each operation changes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast, get_args

from ... import clock
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
)
from ...process import ProcessIdentity, current
from ..base import AliasOptions, BaseLockBackend, Capability, Problem, RenewalResults
from .connection import Connection, Failure
from .listing import DatabaseListing
from .pool import Urgency
from .rows import SECOND, Message, Row, WaitInfo, micro
from .store import POLL_INTERVAL, Store, problems
from .waiting import Expected, pause

__all__ = ["DatabaseBackend"]

T = TypeVar("T")
Change = Callable[[Row, int], tuple[T, list[Message]]]
"""Changes a row at the database's time; returns the answer and the messages for waiters."""

BEAT_EVERY = 4.0
"""Seconds; a renewal sooner than this after the last heartbeat writes no new heartbeat."""
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

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._made: Store | None = None
        self._acquires = 0
        self._beaten: tuple[str, float] = ("", 0.0)
        self._listing = DatabaseListing(options.alias, options.key_prefix)

    @classmethod
    def problems(cls, options: AliasOptions) -> list[Problem]:
        return problems(options)

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        return self._store.is_shared

    @property
    def _store(self) -> Store:
        store = self._made
        if store is None or not store.is_current:
            # Two threads may each make a store; the one stored last is kept.
            self._made, old = Store(self.options), store
            store = self._made
            if old is not None:
                old.close()
        return store

    @property
    def _is_in_use(self) -> bool:
        """Whether this process may have written heartbeats or leases to this database.

        After a test run, the settings name the project's own database again. It has no rows of
        this process.
        """
        return self._made is not None and self._made.is_current

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        process, names = _identity(current()), self._names(request.name)

        def in_one_statement(one: Connection, store: Store, key: Any) -> int:
            ttl = micro(request.ttl)
            asked = (request.owner, request.kind, ttl, process, request.metadata)
            token = store.dialect.acquire(one, key, names, asked)
            if token and self._sweep_is_due():
                self._sweep(one, store)
            return token

        self._keep_session()
        sent_at = clock.now()
        # After one contention on a name, another one is likely: read the row at once.
        if not request.since:
            token = self._ask(in_one_statement, request.name, deadline)
            if token:
                return Lease(request.name, request.owner, token, request.ttl, sent_at)

        expected = Expected.of(self._store.wakeup, request)
        channel = expected.channel if expected else ""

        def change(row: Row, now: int) -> tuple[Lease | Contention, list[Message]]:
            granted, messages = row.acquire(request, now, process, channel)
            if granted:
                return row.lease(request, sent_at), messages
            met = row.contention(request.owner, now, sent_at, expected)
            return met._replace(proven_dead=self._is_proven_dead(met)), messages

        answer = self._change(request.name, change, deadline)
        if isinstance(answer, Lease) and self._sweep_is_due():
            # On MySQL every new name is granted here. A failed sweep must not undo the grant.
            with contextlib.suppress(BackendUnavailable):
                self._ask(lambda one, store, _: self._sweep(one, store), request.name, deadline)
        return answer

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        expected = cast(WaitInfo, contention.ticket).expected
        if not isinstance(expected, Expected):
            time.sleep(pause(contention, until, self._longest_pause))
            return None
        over = self._or_dead(contention, interrupted)
        return expected.wait(request, contention, until, over)

    async def async_wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        expected = cast(WaitInfo, contention.ticket).expected
        if not isinstance(expected, Expected):
            await asyncio.sleep(pause(contention, until, self._longest_pause))
            return None
        over = self._or_dead(contention, interrupted)
        return await expected.async_wait(request, contention, until, over)

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        if not renewals and not self._is_in_use:
            return []
        results: dict[int, RenewalResult] = {}
        plain = [number for number, each in enumerate(renewals) if not each.shorten]

        def use(one: Connection, store: Store) -> None:
            results.clear()
            dialect, beat = store.dialect, self._beat_of(process)
            keys = [dialect.key(self._digest(renewals[number].name)) for number in plain]
            if not plain:
                if beat or not renewals:
                    dialect.beat(one, process)
            else:
                asked = [
                    (key, renewals[number].owner, micro(renewals[number].ttl))
                    for key, number in zip(keys, plain, strict=True)
                ]
                renewed = dialect.renew(one, asked, beat)
                for key, number in zip(keys, plain, strict=True):
                    if dialect.text(key) in renewed:
                        results[number] = RenewalResult("renewed", renewals[number].ttl)
            missed = [number for number in plain if number not in results]
            if missed:
                self._judge(one, store, renewals, missed, results)
            if beat:
                self._beaten = (process, clock.now())

        self._keep_session()
        self._call(use, deadline, "renew")
        for number, each in enumerate(renewals):
            if number not in results:
                outcome = self._renew_alone(each, deadline)
                ttl = each.ttl if outcome == "renewed" else 0.0
                results[number] = RenewalResult(outcome, ttl)
        return [results[number] for number in range(len(renewals))]

    def _judge(
        self,
        one: Connection,
        store: Store,
        renewals: Sequence[Renewal],
        missed: Sequence[int],
        results: dict[int, RenewalResult],
    ) -> None:
        """Find out how the leases that were not renewed ended."""
        keys = {n: store.dialect.key(self._digest(renewals[n].name)) for n in missed}
        now, rows = store.dialect.read_many(one, list(keys.values()))
        for number, key in keys.items():
            row = rows.get(store.dialect.text(key))
            ended = row.outcome_of(renewals[number].owner, now) if row else "refused"
            if ended is not None:
                results[number] = RenewalResult(ended)

    def _renew_alone(self, renewal: Renewal, deadline: float) -> Outcome:
        def change(row: Row, now: int) -> tuple[Outcome, list[Message]]:
            return row.renew(renewal, now), []

        return self._change(renewal.name, change, deadline, "renew")

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        def in_one_statement(one: Connection, store: Store, key: Any) -> bool:
            return store.dialect.release(one, key, owner)

        if not min_hold and self._ask(in_one_statement, name, deadline, "end"):
            return "released"

        def change(row: Row, now: int) -> tuple[Outcome, list[Message]]:
            return row.release(owner, min_hold, now)

        return self._change(name, change, deadline, "end")

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        def use(one: Connection, store: Store) -> set[tuple[str, str]]:
            asked = [(store.dialect.key(self._digest(each.name)), each.owner) for each in plain]
            return store.dialect.release_many(one, asked)

        plain = [each for each in releases if not each.min_hold]
        freed = self._call(use, deadline, "end") if plain else set()
        dialect = self._store.dialect

        def release(each: ReleaseRequest) -> Outcome:
            key = dialect.text(dialect.key(self._digest(each.name)))
            if not each.min_hold and (key, each.owner) in freed:
                return "released"
            return self.release(each.name, each.owner, min_hold=each.min_hold, deadline=deadline)

        return [release(each) for each in releases]

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        def change(row: Row, now: int) -> tuple[None, list[Message]]:
            return None, row.cancel(request, now)

        self._change(request.name, change, deadline, "end")

    def locked(self, name: str, *, deadline: float) -> bool:
        now, row = self._read(name, deadline)
        return row is not None and row.lives(now)

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        def use(one: Connection, store: Store, key: Any) -> LeaseInfo | None:
            return self._listing.get(one, store.dialect, key, name)

        return self._ask(use, name, self.call_deadline())

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        def use(one: Connection, store: Store) -> LeasePage:
            return self._listing.page(one, store.dialect, query, offset, limit)

        return self._call(use, self.call_deadline())

    def break_(self, name: str, *, owner: str) -> bool:
        def change(row: Row, now: int) -> tuple[bool, list[Message]]:
            return row.end_by_break(owner, now)

        return self._change(name, change, self.call_deadline(), "end")

    def deregister(self, process: str, *, deadline: float) -> None:
        def use(one: Connection, store: Store) -> None:
            store.dialect.beat(one, process, gone=True)
            store.dialect.forget_processes(one, PROCESS_MEMORY)

        self._beaten = ("", 0.0)
        if self._is_in_use:
            self._call(use, deadline, "end")

    def store_problems(self) -> list[Problem]:
        def use(one: Connection, store: Store, key: Any) -> None:
            store.dialect.read(one, key)
            # This tells whether the user may write, and nearly always deletes nothing.
            store.dialect.forget_processes(one, PROCESS_MEMORY)

        try:
            self._ask(use, "", self.call_deadline())
        except BackendUnavailable as error:
            if isinstance(error.__cause__, Failure) and error.__cause__.kind in PROBLEMS:
                check_id, hint = PROBLEMS[error.__cause__.kind]
                return [Problem(check_id, f"{error}.", hint)]
            raise
        return []

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        if self._made is not None:
            self._made.forget()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _sweep_is_due(self) -> bool:
        # Threads may count one too few; that does no harm.
        self._acquires += 1
        return self._acquires % SWEEP_EVERY == 0

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

    def _beat_of(self, process: str) -> str:
        """The process id, if a new heartbeat is due; else an empty string."""
        known, at = self._beaten
        return "" if known == process and clock.now() - at < BEAT_EVERY else process

    # -- internals ------------------------------------------------------------------------

    def _keep_session(self) -> None:
        """With ``OPTIONS["proof"]``, keep the session open that proves this process alive."""
        if self.options.options.get("proof") and (wakeup := self._store.wakeup) is not None:
            wakeup.keep_listening()

    def _is_proven_dead(self, met: Contention) -> bool:
        session = self._store.session
        return session is not None and met.kind == "held" and session.is_dead(met.process)

    def _or_dead(self, met: Contention, interrupted: Callable[[], bool]) -> Callable[[], bool]:
        """Also end the wait when the holder is proven dead."""
        return lambda: self._is_proven_dead(met) or interrupted()

    @property
    def _longest_pause(self) -> float:
        return float(self.options.options.get("poll_interval", POLL_INTERVAL))

    def _names(self, name: str) -> tuple[str, str]:
        return self.options.key_prefix, name

    def _digest(self, name: str) -> bytes:
        # Names are compared exactly, whatever the database's rules for case and accents.
        prefix = self.options.key_prefix
        text = f"{len(prefix)}:{prefix}{name}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def _read(self, name: str, deadline: float) -> tuple[int, Row | None]:
        return self._ask(lambda one, store, key: store.dialect.read(one, key), name, deadline)

    def _change(
        self, name: str, change: Change[T], deadline: float, urgency: Urgency = "ordinary"
    ) -> T:
        """Read the row, change it and write it; repeat while other callers change it first."""

        def use(one: Connection, store: Store, key: Any) -> T:
            now, row = store.dialect.read(one, key)
            is_new = row is None
            if row is None:
                # Higher than any version that a deleted row of this name can have had.
                row = Row(version=now)
            before = row.values()
            answer, messages = change(row, now)
            if row.values() == before:
                return answer
            if is_new:
                written = store.dialect.insert(one, key, self._names(name), row, messages)
            else:
                written = store.dialect.write(one, key, before, row, messages)
            if not written:
                raise Failure("passing", RuntimeError("other callers kept changing the lock's row"))
            return answer

        return self._ask(use, name, deadline, urgency)

    def _ask(
        self,
        use: Callable[[Connection, Store, Any], T],
        name: str,
        deadline: float,
        urgency: Urgency = "ordinary",
    ) -> T:
        digest = self._digest(name)

        def with_key(one: Connection, store: Store) -> T:
            return use(one, store, store.dialect.key(digest))

        return self._call(with_key, deadline, urgency, name)

    def _call(
        self,
        use: Callable[[Connection, Store], T],
        deadline: float,
        urgency: Urgency = "ordinary",
        name: str = "",
    ) -> T:
        store = self._store
        try:
            return store.pool.call(lambda one: use(one, store), deadline, urgency)
        except Failure as error:
            self._unavailable(error, store, name)

    def _unavailable(self, error: Failure, store: Store, name: str) -> NoReturn:
        database = f"DATABASES[{store.database!r}]"
        migrate = f"manage.py migrate django_dlock --database {store.database}"
        option = f"DLOCKS[{self.alias!r}]['OPTIONS']['database']"
        told = {
            "missing": f"{database} has no table for locks; run {migrate}",
            "read-only": f"{database} is read-only, as a standby is; name the primary in {option}",
            "denied": f"{database} refuses the user, its password or its rights",
            "refused": f"{database} refused the statement",
            "unreachable": f"No connection to {database}",
        }.get(error.kind, f"{database} gave no answer")
        refused = error.kind in ("missing", "denied", "refused")
        kind = BackendRefused if refused else BackendUnavailable
        raise kind(f"{told}: {error}", name, self.alias) from error


@functools.lru_cache(maxsize=1)
def _identity(process: ProcessIdentity) -> str:
    return json.dumps(process.as_dict(), separators=(",", ":"))
