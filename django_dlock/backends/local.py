"""Leases of one process: the reference implementation, for tests and development.

It does not lock anything between processes, so it must be chosen explicitly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, get_args

from .. import clock
from ..lease import (
    Contention,
    Kind,
    Lease,
    LeaseInfo,
    LeasePage,
    LeaseQuery,
    LeaseRequest,
    Outcome,
    Renewal,
    RenewalResult,
    Waiter,
    in_order,
)
from ..process import ProcessIdentity, current
from .base import AliasOptions, BackendOptions, BaseLockBackend, Capability, RenewalResults
from .operator_rows import lease_row, waiter_row

__all__ = ["LocalBackend"]

P = ParamSpec("P")
T = TypeVar("T")

MEMORY = 60.0
"""Seconds in addition to the TTL for which ends and cancelled requests are remembered."""
ASK_EVERY = 0.5


@dataclass
class _Entry:
    """A lease that ends at ``until``; also one of kind ``cooling``."""

    owner: str
    kind: Kind
    ttl: float
    metadata: str
    token: int
    at: float
    wall_at: float
    until: float
    process: ProcessIdentity
    renewals: int = 0
    shortened: int = 0


class LocalBackend(BaseLockBackend):
    """Dictionaries under one condition; the clock is ``clock.now()``."""

    capabilities = frozenset(get_args(Capability))
    is_shared = False
    own_options = BackendOptions

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._forget_all()

    def _forget_all(self) -> None:
        # Reentrant: a finalizer may release on a thread that is inside an acquire. Enter the lock
        # itself and not the condition, which an interrupt can leave locked; see
        # core/event_queue.py.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[str, _Entry] = {}
        # Name and owner → how the lease ended, and until when that is remembered; ``refused`` for a
        # request that was cancelled and had none. Such an owner holds nothing and is never granted
        # the name again.
        self._ends: dict[tuple[str, str], tuple[Outcome, float]] = {}
        # Name and owner → when it began to wait, and its metadata; in the order of arrival.
        self._waiters: dict[tuple[str, str], tuple[float, str]] = {}
        self._gone: set[str] = set()
        self._highest = 0
        self._sweep_at = 1000

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        now, name, waiter = clock.now(), request.name, (request.name, request.owner)
        with self._lock:
            entry = self._living(name, now)
            if entry is None or not request.waits or waiter in self._ends:
                self._waiters.pop(waiter, None)
            if end := self._ends.get(waiter):
                # Its caller goes on with a new attempt if it had a lease.
                return self._contention(None if end[0] != "refused" else entry, now)
            if entry is not None and entry.owner == request.replaces and entry.kind != "cooling":
                self._end(name, "released", now)
                entry = None
            if entry is not None and entry.owner != request.owner:
                if request.waits:
                    self._waiters.setdefault(waiter, (now, request.metadata))
                return self._contention(entry, now)
            self._waiters.pop(waiter, None)
            if entry is None:
                entry = self._grant(request, now)
            entry.ttl = max(entry.ttl, request.ttl)
            entry.until = max(entry.until, now + request.ttl)
            return Lease(name, entry.owner, entry.token, request.ttl, asked_at=now)

    def _grant(self, request: LeaseRequest, now: float) -> _Entry:
        self._sweep(now)
        self._highest = max(self._highest + 1, time.time_ns() // 1000)
        entry = self._entries[request.name] = _Entry(
            owner=request.owner,
            kind=request.kind,
            ttl=request.ttl,
            metadata=request.metadata,
            token=self._highest,
            at=now,
            wall_at=time.time(),
            until=now + request.ttl,
            process=current(),
        )
        return entry

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        while (now := clock.now()) < until and not interrupted():
            with self._lock:
                entry = self._living(request.name, now)
                if entry is None:
                    break
                self._changed.wait(min(entry.until - now, until - now, ASK_EVERY))
        return None

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        now = clock.now()
        with self._lock:
            self._gone.discard(process)
            return [self._renew(renewal, now) for renewal in renewals]

    def _renew(self, renewal: Renewal, now: float) -> RenewalResult:
        entry = self._owned(renewal.name, renewal.owner, now)
        if not isinstance(entry, _Entry):
            return RenewalResult(entry)
        until = now + renewal.ttl
        if renewal.shorten > entry.shortened:
            entry.shortened = renewal.shorten
            # Waiters sleep until the end that they know, so wake them.
            self._changed.notify_all()
        else:
            until = max(entry.until, until)
        entry.ttl, entry.until = max(renewal.ttl, until - now), until
        entry.renewals += 1
        return RenewalResult("renewed", renewal.ttl)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        now = clock.now()
        with self._lock:
            entry = self._owned(name, owner, now)
            if not isinstance(entry, _Entry):
                return entry
            if entry.at + min_hold > now:
                self._remember(name, owner, "released", now + entry.ttl)
                entry.kind, entry.until = "cooling", entry.at + min_hold
                self._changed.notify_all()
            else:
                self._end(name, "released", now)
            return "released"

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        now, name, owner = clock.now(), request.name, request.owner
        with self._lock:
            self._waiters.pop((name, owner), None)
            if isinstance(self._owned(name, owner, now), _Entry):
                self._end(name, "released", now)
            # If it was granted, the end of that lease is remembered.
            self._remember(name, owner, "refused", now + request.ttl)

    async def acall(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        # Nothing here blocks.
        return method(*args, **kwargs)

    def locked(self, name: str, *, deadline: float) -> bool:
        with self._lock:
            return self._living(name, clock.now()) is not None

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        now = clock.now()
        with self._lock:
            entry = self._living(name, now)
            return None if entry is None else self._info(name, entry, now)

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        now = clock.now()
        with self._lock:
            living = ((name, self._living(name, now)) for name in names)
            return {name: self._info(name, it, now) for name, it in living if it is not None}

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        now = clock.now()
        with self._lock:
            living = [
                self._info(name, entry, now)
                for name in list(self._entries)
                if (entry := self._living(name, now)) is not None
            ]
        # By token last, so that equal rows are in the order of their grants.
        infos = in_order(filter(query.matches, living), [*query.sort, "token"])
        end = None if limit is None else offset + limit
        return LeasePage(infos[offset:end], len(infos))

    def waiters(self, name: str, *, limit: int = 100) -> list[Waiter]:
        now, wall, me = clock.now(), time.time(), current()
        with self._lock:
            found = [(own, it) for (other, own), it in self._waiters.items() if other == name]
            is_gone = me.id in self._gone
        return [
            waiter_row(
                name=name,
                alias=self.alias,
                owner=owner,
                now=wall,
                since=wall - (now - since),
                process=me,
                metadata=metadata,
                deregistered=is_gone,
            )
            for owner, (since, metadata) in found[: max(0, limit)]
        ]

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        now = clock.now()
        with self._lock:
            entry = self._living(name, now)
            if entry is None or entry.owner != owner:
                return False
            self._end(name, "broken", now)
            return True

    def deregister(self, process: str, *, deadline: float) -> None:
        with self._lock:
            self._gone.add(process)

    def after_fork(self) -> None:
        # Leases of this backend belong to one process, and the child is another one.
        self._forget_all()

    # -- inside ------------------------------------------------------------------------

    def _living(self, name: str, now: float) -> _Entry | None:
        """The present lease on the name; ends it first if it has expired."""
        entry = self._entries.get(name)
        if entry is not None and now >= entry.until:
            self._end(name, "expired", entry.until)
            return None
        return entry

    def _owned(self, name: str, owner: str, now: float) -> _Entry | Outcome:
        """The owner's lease, or how it ended."""
        entry = self._living(name, now)
        end = self._ends.get((name, owner))
        if end is not None:
            return end[0]
        return entry if entry is not None and entry.owner == owner else "refused"

    def _end(self, name: str, outcome: Outcome, at: float) -> None:
        entry = self._entries.pop(name)
        self._remember(name, entry.owner, outcome, at + entry.ttl)
        self._changed.notify_all()

    def _remember(self, name: str, owner: str, outcome: Outcome, until: float) -> None:
        # The first end counts: a cooling lease was released, and does not expire later.
        self._ends.setdefault((name, owner), (outcome, until + MEMORY))

    def _contention(self, entry: _Entry | None, now: float) -> Contention:
        if entry is None:
            return Contention("", "held", 0.0, time.time())
        left = entry.until - now
        return Contention(entry.owner, entry.kind, left, time.time(), entry.process)

    def _info(self, name: str, entry: _Entry, now: float) -> LeaseInfo:
        process = entry.process
        return lease_row(
            name=name,
            alias=self.alias,
            kind=entry.kind,
            owner=entry.owner,
            token=entry.token,
            # By the wall clock of the grant, even if that has been set since.
            now=entry.wall_at + (now - entry.at),
            at=entry.wall_at,
            ttl=entry.until - now,
            granted_ttl=entry.ttl,
            renewals=entry.renewals,
            waiting=sum(waited_for == name for waited_for, _ in self._waiters),
            process=process,
            metadata=entry.metadata,
            # The holder is this very process, so it is never silent.
            silent_for=0.0,
            deregistered=process.id in self._gone,
        )

    def _sweep(self, now: float) -> None:
        """Discard the ends of old leases, whenever the number of entries has doubled."""
        if len(self._entries) + len(self._ends) < self._sweep_at:
            return
        for name in list(self._entries):
            self._living(name, now)
        self._ends = {key: end for key, end in self._ends.items() if now < end[1]}
        self._sweep_at = 2 * (len(self._entries) + len(self._ends)) + 1000
