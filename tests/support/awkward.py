"""A store with the least abilities that a store may have, and with slow answers."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from django_dlock import clock
from django_dlock.backends.base import AliasOptions, BaseLockBackend, RenewalResults
from django_dlock.backends.holder_state import json_object
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import (
    Contention,
    Lease,
    LeaseInfo,
    LeaseRequest,
    Outcome,
    Renewal,
    RenewalResult,
)
from django_dlock.process import ProcessIdentity, current

T = TypeVar("T")

LATE = 0.002
"""Seconds between an operation of the store and its answer."""
GRANTED = 0.5
"""The part of the requested TTL that is granted."""


@dataclass
class _Row:
    owner: str
    token: int
    until: float
    process: ProcessIdentity
    metadata: str
    at: float
    shortened: int = 0


class AwkwardBackend(BaseLockBackend):
    """Grants half of the requested TTL, wakes no waiter, remembers nothing and lists nothing.

    Attributes:
        lost: Methods whose next answer is lost, although they are executed.
        called: Names of the methods that were called.
        renewed: How many leases each call of ``renew`` named.
    """

    is_shared = False
    renewals_per_call = 7
    heartbeat = None

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self.lost: list[str] = []
        self.called: list[str] = []
        self.renewed: list[int] = []
        self.rows: dict[str, _Row] = {}
        self._lock = threading.Lock()
        self._token = 0

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        def grant(now: float) -> Lease | Contention:
            row, ttl = self.rows.get(request.name), request.ttl * GRANTED
            if row is None:
                self._token += 1
                row = self.rows[request.name] = _Row(
                    request.owner, self._token, now + ttl, current(), request.metadata, now
                )
            elif row.owner != request.owner:
                return Contention(row.owner, "held", row.until - now, time.time(), row.process)
            row.until = max(row.until, now + ttl)
            return Lease(request.name, row.owner, row.token, ttl, asked_at)

        asked_at = clock.now()
        return self._carry_out("acquire", grant)

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        self.renewed.append(len(renewals))
        return self._carry_out("renew", lambda now: [self._renew(one, now) for one in renewals])

    def _renew(self, renewal: Renewal, now: float) -> RenewalResult:
        row, ttl = self.rows.get(renewal.name), renewal.ttl * GRANTED
        if row is None:
            return RenewalResult("unknown")
        if row.owner != renewal.owner:
            return RenewalResult("refused")
        if renewal.shorten > row.shortened:
            row.shortened, row.until = renewal.shorten, min(row.until, now + renewal.ttl)
        row.until = max(row.until, now + ttl)
        return RenewalResult("renewed", ttl)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        assert not min_hold
        ended = self._carry_out("release", lambda now: self._end(name, owner))
        return "released" if ended else "unknown"

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        self._carry_out("cancel_acquire", lambda now: self._end(request.name, request.owner))

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        return self._carry_out("break_silently", lambda now: self._end(name, owner))

    def locked(self, name: str, *, deadline: float) -> bool:
        return self._carry_out("locked", lambda now: name in self.rows)

    def get(self, name: str) -> LeaseInfo | None:
        def read(now: float) -> LeaseInfo | None:
            row = self.rows.get(name)
            return row and LeaseInfo(
                name=name,
                alias=self.alias,
                kind="held",
                owner=row.owner,
                token=row.token,
                acquired_at=dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=now - row.at),
                age=now - row.at,
                ttl=row.until - now,
                renewals=0,
                waiting=0,
                process=row.process,
                holder_state="unknown",
                metadata=json_object(row.metadata),
            )

        return self._carry_out("get", read)

    # -- internals ------------------------------------------------------------------------

    def _carry_out(self, method: str, step: Callable[[float], T]) -> T:
        """One atomic step on the leases that have not expired; its answer is slow or lost."""
        with self._lock:
            self.called.append(method)
            now = clock.now()
            self.rows = {name: row for name, row in self.rows.items() if now < row.until}
            answer = step(now)
            lost = method in self.lost
            if lost:
                self.lost.remove(method)
        time.sleep(LATE)
        if lost:
            raise BackendUnavailable("The answer was lost", "", self.alias)
        return answer

    def _end(self, name: str, owner: str) -> bool:
        row = self.rows.get(name)
        if row is None or row.owner != owner:
            return False
        del self.rows[name]
        return True
