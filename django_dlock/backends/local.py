"""Leases of one process: the reference implementation, for tests and development.

It guards nothing between processes, so it is never chosen unasked.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import clock
from ..exceptions import InvalidLockBackend
from ..lease import (
    Contention,
    Fate,
    Kind,
    Lease,
    LeaseInfo,
    LeasePage,
    LeaseQuery,
    LeaseRequest,
    Renewal,
    in_order,
)
from ..process import ProcessIdentity, current
from .base import AliasOptions, BaseLockBackend, Fates
from .describe import holder_state, json_object

__all__ = ["LocalBackend"]

MEMORY = 60.0
"""Seconds, besides the TTL, for which an end, or an undone attempt, is remembered."""
ASK_EVERY = 0.5


@dataclass
class _Entry:
    """One name: who has it, or had it last. It is taken until ``until``."""

    owner: str
    token: int
    kind: Kind
    ttl: float
    at: float
    wall_at: float
    until: float
    process: ProcessIdentity
    metadata: str
    previous: tuple[str, Fate] | None
    ended: Fate | None = None
    renewals: int = 0

    def fate(self, now: float) -> Fate | None:
        """How the lease ended, ``None`` while it lives."""
        if self.ended is None and now >= self.until:
            return "expired"
        return self.ended

    def fate_of(self, owner: str, now: float) -> Fate | None:
        """As ``fate``, for one who claims to own it, or to have owned it before."""
        if owner == self.owner:
            return self.fate(now)
        if self.previous is not None and self.previous[0] == owner:
            return self.previous[1]
        return "refused"

    def is_held_by(self, owner: str, now: float) -> bool:
        """Whether the owner's lease lives and was not given back."""
        return owner == self.owner and self.fate(now) is None and self.kind != "cooling"

    def end(self, fate: Fate, now: float) -> None:
        self.ended, self.until = fate, now


class LocalBackend(BaseLockBackend):
    """Dictionaries under one condition; the clock is ``clock.now()``."""

    supports_wakeup = True
    supports_listing = True
    is_shared = False

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        if options.options:
            raise InvalidLockBackend(
                f"DLOCKS[{options.alias!r}]['OPTIONS'] has {sorted(options.options)}; the local "
                "backend takes 'command_timeout' only"
            )
        self._forget_all()

    def _forget_all(self) -> None:
        # Reentrant: a finalizer may release while its own thread acquires. Entered as it is and
        # not as the condition, which an interrupt can leave locked, see events.py.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._entries: dict[str, _Entry] = {}
        self._undone: dict[str, float] = {}
        self._waiters: dict[str, set[str]] = {}
        self._heard: dict[str, float] = {}
        self._gone: set[str] = set()
        self._highest = 0
        self._sweep_at = 1000

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        now = clock.now()
        with self._lock:
            entry = self._entries.get(request.name)
            if request.owner in self._undone:
                return self._contention(entry, now)
            if entry is not None and entry.owner == request.owner:
                if entry.ended is not None:
                    # Late news of an attempt whose lease has been given back since.
                    return self._contention(entry, now)
                if now < entry.until:
                    entry.until = max(entry.until, now + request.ttl)
                    return self._lease(entry, request, now)
            if entry is not None and entry.is_held_by(request.replaces, now):
                entry.end("released", now)
            if entry is not None and now < entry.until:
                if request.waits:
                    self._waiters.setdefault(request.name, set()).add(request.owner)
                else:
                    self._forget_waiter(request)
                return self._contention(entry, now)
            self._forget_waiter(request)
            self._sweep(now)
            return self._lease(self._grant(request, entry, now), request, now)

    def _grant(self, request: LeaseRequest, before: _Entry | None, now: float) -> _Entry:
        self._highest = max(self._highest + 1, time.time_ns() // 1000)
        fate = before.fate(now) if before is not None else None
        process = current()
        self._heard[process.id] = now
        entry = self._entries[request.name] = _Entry(
            owner=request.owner,
            token=self._highest,
            kind=request.kind,
            ttl=request.ttl,
            at=now,
            wall_at=time.time(),
            until=now + request.ttl,
            process=process,
            metadata=request.metadata,
            previous=(before.owner, fate) if before is not None and fate is not None else None,
        )
        return entry

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        while (now := clock.now()) < until and not interrupted():
            with self._lock:
                entry = self._entries.get(request.name)
                if entry is None or now >= entry.until:
                    break
                self._changed.wait(min(entry.until - now, until - now, ASK_EVERY))
        return None

    def renew(self, renewals: Sequence[Renewal], *, process: str, deadline: float) -> Fates:
        now = clock.now()
        with self._lock:
            self._heard[process] = now
            self._gone.discard(process)
            return [self._renew(renewal, now) for renewal in renewals]

    def _renew(self, renewal: Renewal, now: float) -> Fate:
        entry = self._entries.get(renewal.name)
        if entry is None:
            return "refused"
        fate = entry.fate_of(renewal.owner, now)
        if fate is not None:
            return fate
        entry.ttl, entry.until = renewal.ttl, max(entry.until, now + renewal.ttl)
        entry.renewals += 1
        return "renewed"

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Fate:
        now = clock.now()
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                return "refused"
            fate = entry.fate_of(owner, now)
            if fate is None:
                fate = "released"
                entry.end(fate, now)
                if entry.at + min_hold > now:
                    entry.kind, entry.until = "cooling", entry.at + min_hold
                self._changed.notify_all()
            return fate

    def undo(self, request: LeaseRequest, *, deadline: float) -> None:
        now = clock.now()
        with self._lock:
            self._undone[request.owner] = now + request.ttl + MEMORY
            self._forget_waiter(request)
            entry = self._entries.get(request.name)
            if entry is not None and entry.fate_of(request.owner, now) is None:
                entry.end("released", now)
            self._changed.notify_all()

    def locked(self, name: str, *, deadline: float) -> bool:
        with self._lock:
            entry = self._entries.get(name)
            return entry is not None and clock.now() < entry.until

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        now = clock.now()
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None or now >= entry.until else self._info(name, entry, now)

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        now = clock.now()
        with self._lock:
            living = [
                self._info(name, entry, now)
                for name, entry in self._entries.items()
                if now < entry.until
            ]
        # In order of the grants first, which is how equal ones stand.
        infos = in_order(filter(query.matches, living), [*query.sort, "token"])
        end = None if limit is None else offset + limit
        return LeasePage(infos[offset:end], len(infos))

    def break_(self, name: str, *, owner: str, reason: str = "broken") -> bool:
        now = clock.now()
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or entry.owner != owner or now >= entry.until:
                return False
            entry.end("broken", now)
            self._changed.notify_all()
            return True

    def last_end(self, name: str) -> tuple[str, Fate] | None:
        now = clock.now()
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or now < entry.until:
                return None
            fate = entry.fate(now)
            return (entry.owner, fate) if fate is not None else None

    def goodbye(self, process: str, *, deadline: float) -> None:
        with self._lock:
            self._gone.add(process)

    def after_fork(self) -> None:
        # A child is another process, and leases of this backend are of one.
        self._forget_all()

    # -- inside ------------------------------------------------------------------------

    def _lease(self, entry: _Entry, request: LeaseRequest, sent_at: float) -> Lease:
        return Lease(
            name=request.name,
            owner=entry.owner,
            token=entry.token,
            ttl=request.ttl,
            deadline=sent_at + request.ttl * (1 - clock.DRIFT),
        )

    def _contention(self, entry: _Entry | None, now: float) -> Contention:
        if entry is None or now >= entry.until:
            return Contention(owner="", kind="held", remaining=0.0, now=time.time())
        return Contention(
            owner=entry.owner,
            kind=entry.kind,
            remaining=entry.until - now,
            now=time.time(),
            process=entry.process,
        )

    def _info(self, name: str, entry: _Entry, now: float) -> LeaseInfo:
        process = entry.process
        unheard = now - self._heard.get(process.id, entry.at)
        return LeaseInfo(
            name=name,
            alias=self.alias,
            kind=entry.kind,
            owner=entry.owner,
            token=entry.token,
            acquired_at=dt.datetime.fromtimestamp(entry.wall_at, tz=dt.timezone.utc),
            age=now - entry.at,
            ttl=entry.until - now,
            renewals=entry.renewals,
            waiting=len(self._waiters.get(name, ())),
            process=process,
            holder_state=holder_state(
                entry.kind,
                process,
                unheard=unheard,
                goodbye=process.id in self._gone,
            ),
            metadata=json_object(entry.metadata),
            unheard=unheard,
        )

    def _forget_waiter(self, request: LeaseRequest) -> None:
        waiters = self._waiters.get(request.name)
        if waiters is not None:
            waiters.discard(request.owner)
            if not waiters:
                del self._waiters[request.name]

    def _sweep(self, now: float) -> None:
        """Forget old ends, whenever the names have doubled."""
        if len(self._entries) < self._sweep_at:
            return
        for name, entry in list(self._entries.items()):
            if now >= entry.until + entry.ttl + MEMORY:
                del self._entries[name]
        self._undone = {owner: end for owner, end in self._undone.items() if now < end}
        self._sweep_at = 2 * len(self._entries) + 1000
