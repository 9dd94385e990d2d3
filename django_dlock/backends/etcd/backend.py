"""Leases in etcd.

* A held name is a key, and the revision that created it is the token. It is attached to a lease
  of etcd, which deletes it when the lease ends.
* A grant gets a lease of etcd first, and then creates the key in a transaction, if there is none.
  It counts only under the lease that the key has: the key may be that of an earlier try. A copy of
  that transaction that arrives late, after the release, finds no such lease any more.
  If others held the name before, the key is read first, so that a caller that finds it taken again
  has not got a lease of etcd in vain.
* A renewal gets a new lease of etcd, and attaches the keys to it. It does not keep the old one
  alive: that is answered by one member alone, which may wrongly take itself for the leader, and
  older releases of etcd revoke leases that were kept alive elsewhere. A new lease is agreed upon by
  a quorum, and no member ends it before its time.
* etcd measures leases in whole seconds, so a lease is rounded up, and lives for one or two seconds
  at least. The holder is granted no more than it has asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

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
from ...process import current
from ..base import AliasOptions, BaseLockBackend, Fact, Problem, RenewalResults
from . import config
from .client import Client, Denied, NotFound
from .entries import (
    Entry,
    Json,
    delete_if_owned,
    deleted_of,
    encoded,
    entries_of,
    now_of,
    prefix_of,
    put,
    put_if_free,
    read,
    read_all,
    value_of,
)
from .listing import EtcdListing
from .renewal import renew_once
from .store import PER_TRANSACTION, Store
from .watch import Watch

NEVER_ENDS = 10.0
"""Seconds after which a waiter asks again where another program has written the key."""
MOST_CONTENDED = 1000
"""Names that are remembered because others held them."""
GRACE = 1.0
"""Seconds after the end of a lease within which etcd should have deleted its key."""


class _Ticket(NamedTuple):
    """What a waiter needs: its key, and the revision at which it was found."""

    key: str
    revision: int


@dataclass
class _Attempt:
    """An acquire that is not answered yet, with the leases of etcd that it may use."""

    leases: list[int] = field(default_factory=list)
    cancelled: bool = False


class EtcdBackend(BaseLockBackend):
    """See the module. Waiters are in ``watch``, the network is in ``client``."""

    capabilities = frozenset({"listing", "wakeup"})
    renewals_per_call = PER_TRANSACTION
    heartbeat = None
    own_options = config.EtcdOptions

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._client = Client(options, self.own_options.read(options))
        self._store = Store(self._client, prefix_of(options.key_prefix))
        self._listing = EtcdListing(options.alias, self._store, self.command_timeout)
        self._watch = Watch(self._client, self._store.prefix, self.command_timeout)
        # By owner, so that ``cancel_acquire`` finds them.
        self._attempts: dict[str, _Attempt] = {}
        # Keys that others held when this process last asked.
        self._contended: set[str] = set()

    @classmethod
    def warnings(cls, options: AliasOptions) -> list[Problem]:
        return config.warnings(options, cls.own_options.read(options))

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        attempt = self._attempts.setdefault(request.owner, _Attempt())
        answer = None
        try:
            while answer is None:
                answer = self._try(request, attempt, deadline)
        except BackendUnavailable as error:
            # The key is written only under one of them.
            if not attempt.leases and not attempt.cancelled:
                error.unsent = True
                self._attempts.pop(request.owner, None)
            raise
        if isinstance(answer, Contention):
            # An earlier copy of the transaction may still arrive, after the holder's release.
            self._store.discard(attempt.leases, deadline)
        # Without an answer it stays, and is cancelled or repeated.
        self._attempts.pop(request.owner, None)
        return answer

    def _try(
        self, request: LeaseRequest, attempt: _Attempt, deadline: float
    ) -> Lease | Contention | None:
        """``None`` if the name has changed hands meanwhile, so that it must be tried again."""
        key, asked_at = self._store.key(request.name), clock.now()
        if not attempt.leases and key not in self._contended:
            return self._create(request, attempt, asked_at, deadline)
        read_at = self._store.transaction([read(key)], deadline)
        (entry,) = entries_of(read_at)
        if entry is None:
            self._contended.discard(key)
            return self._create(request, attempt, asked_at, deadline)
        if entry.owner != request.owner:
            return self._contention(key, entry, read_at, deadline)
        # The answer to an earlier copy of this request was lost.
        renewal = Renewal(request.name, request.owner, request.ttl)
        (result,) = renew_once(self._store, [renewal], deadline)
        if result is None or result.outcome != "renewed":
            return None
        self._store.discard(attempt.leases, deadline)
        return Lease(request.name, request.owner, entry.token, request.ttl, asked_at)

    def _create(
        self,
        request: LeaseRequest,
        attempt: _Attempt,
        asked_at: float,
        deadline: float,
    ) -> Lease | Contention | None:
        key, granted = self._store.key(request.name), self._store.grant(request.ttl, deadline)
        attempt.leases.append(granted.id)
        if attempt.cancelled:
            return Contention("", "held", 0.0, granted.at)
        facts = {"kind": request.kind, "at": int(granted.at), "ttl": granted.ttl}
        process = json.dumps(current().as_dict())
        value = value_of(request.owner, facts, process, request.metadata)
        try:
            answer = self._store.call("kv/txn", put_if_free(key, value, granted.id), deadline)
        except NotFound:
            # It was cancelled, or etcd did not answer for as long as the lease lived.
            return Contention("", "held", 0.0, granted.at) if attempt.cancelled else None
        token = int(answer["header"]["revision"])
        if not answer.get("succeeded"):
            (entry,) = entries_of(answer)
            if entry is None or entry.owner != request.owner:
                return entry and self._contention(key, entry, answer, deadline)
            if entry.lease != granted.id:
                # Of an earlier try, whose transaction was late. Its lease began before this try,
                # so it counts only once it is renewed.
                return None
            # The client has repeated the transaction.
            token = entry.token
        # Copies of earlier tries may still be on their way to a member.
        self._store.discard(attempt.leases[:-1], deadline)
        return Lease(request.name, request.owner, token, request.ttl, asked_at)

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        results: dict[int, RenewalResult] = {}
        while left := [number for number in range(len(renewals)) if number not in results]:
            # A transaction writes a key only once, so the second renewal of a name comes later.
            batch = {renewals[number].name: number for number in reversed(left)}
            once = [renewals[number] for number in batch.values()]
            answers = renew_once(self._store, once, deadline)
            pairs = zip(batch.values(), answers, strict=True)
            results.update((number, answer) for number, answer in pairs if answer is not None)
        return [results[number] for number in range(len(renewals))]

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        answer = self._store.call("kv/txn", delete_if_owned(self._store.key(name), owner), deadline)
        deleted = deleted_of(answer)
        if deleted is None:
            return "unknown"
        if not deleted.facts.get("shared"):
            # A late copy of the acquire finds no lease any more.
            self._store.discard([deleted.lease], deadline)
        return "released"

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        deletes = [delete_if_owned(self._store.key(it.name), it.owner) for it in releases]
        answer = self._store.transaction([{"request_txn": delete} for delete in deletes], deadline)
        responses = (response["response_txn"] for response in answer.get("responses", ()))
        return ["unknown" if deleted_of(one) is None else "released" for one in responses]

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        attempt = self._attempts.setdefault(request.owner, _Attempt())
        attempt.cancelled, key = True, self._store.key(request.name)
        for lease in list(attempt.leases):
            # First the leases: after that, no late transaction can create the key.
            with contextlib.suppress(NotFound):
                self._store.call("lease/revoke", {"ID": str(lease)}, deadline)
        self._store.call("kv/txn", delete_if_owned(key, request.owner), deadline)
        self._attempts.pop(request.owner, None)
        # Its wake-up may be what another waiter of this process needs.
        self._watch.wake(key)

    def locked(self, name: str, *, deadline: float) -> bool:
        (entry,) = entries_of(self._store.transaction([read(self._store.key(name))], deadline))
        return entry is not None

    # -- waiters -----------------------------------------------------------------------

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        ticket = contention.ticket
        if isinstance(ticket, _Ticket):
            until = _until(contention, until)
            self._watch.wait(request.owner, *ticket, until=until, interrupted=interrupted)
        return None

    async def async_wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        ticket = contention.ticket
        if isinstance(ticket, _Ticket):
            until = _until(contention, until)
            await self._watch.async_wait(
                *(request.owner, *ticket),
                until=until,
                interrupted=interrupted,
                abandoned=partial(self._abandon, request),
            )
        return None

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        return self._listing.get(name)

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        return self._listing.get_many(names)

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        return self._listing.page(query, offset, limit)

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        key, deadline = self._store.key(name), deadline or self.call_deadline()
        (entry,) = entries_of(self._store.transaction([read(key)], deadline))
        if entry is None or entry.owner != owner:
            return False
        answer = self._store.call("kv/txn", delete_if_owned(key, owner), deadline)
        # An earlier copy, whose reply was lost, may have deleted it.
        return deleted_of(answer) is not None or bool(answer["repeated"])

    def store_problems(self) -> Sequence[Problem]:
        key, deadline = encoded(self._store.prefix), self.call_deadline()
        never = {"key": key, "target": "CREATE", "result": "LESS", "create_revision": "0"}
        try:
            # etcd checks the rights for both branches, and carries out the second.
            write = {"compare": [never], "success": [put(key, "", 0)]}
            self._store.call(
                "kv/txn", {**write, "failure": [read_all(self._store.prefix)]}, deadline
            )
        except Denied as error:
            return [config.denied(self.options, self._store.prefix, error)]
        return ()

    def facts(self, *, deadline: float) -> Sequence[Fact]:
        try:
            answer = self._store.call("maintenance/status", {}, deadline)
        except BackendRefused:
            # Some versions let only administrators ask this.
            return ()
        return config.facts(answer)

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._attempts = {}
        self._watch.forget()
        self._client.forget()

    def close_unused(self) -> None:
        self._client.close_unused()

    def close(self) -> None:
        self._watch.close()
        self._client.close()

    # -- inside ------------------------------------------------------------------------

    def _contention(self, key: str, entry: Entry, answer: Json, deadline: float) -> Contention:
        if len(self._contended) >= MOST_CONTENDED:
            self._contended.clear()
        self._contended.add(key)
        left = self._store.left(entry, deadline)
        # It was rounded down.
        remaining = NEVER_ENDS if left is None else min(left + 1, entry.number("ttl") or left + 1)
        ticket = _Ticket(key, int(answer["header"]["revision"]))
        now = now_of(answer)
        return Contention(entry.owner, entry.kind, remaining, now, entry.process, ticket)


def _until(contention: Contention, until: float) -> float:
    """When a waiter asks again, even if nothing wakes it."""
    return min(until, clock.now() + contention.remaining + GRACE)
