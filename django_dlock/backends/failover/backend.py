"""Leases in a primary store or in a standby; a row in the database says which one is active.

``record`` has the row, ``rules`` says what a process may do with what it has read there, ``terms``
has the stores, and ``health`` says when a process switches by itself.

* The fencing token is the epoch, which rises with every switch, in front of the store's token.
* After a switch, leases of the previous epoch are not renewed any more. They are in doubt at once,
  and lost at their deadline at the latest.
* Until all of them are over, nothing is granted, and nobody is told that a name is free.
* Parked and reserved leases, and names that are kept for ``min_hold``, are given up by a switch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

from ... import clock
from ...exceptions import BackendUnavailable
from ...lease import Contention, Lease, LeaseRequest, Outcome, ReleaseRequest, Renewal
from ..base import (
    AliasOptions,
    BaseLockBackend,
    Capability,
    PendingRenewal,
    RenewalResults,
    StoreSwitch,
)
from . import config
from .active import ActiveStore
from .operators import OperatorCalls
from .renewal import TermRenewal
from .rules import View
from .terms import StoreCall, Term
from .trial import check_token

P = ParamSpec("P")
T = TypeVar("T")


class FailoverBackend(OperatorCalls):
    """See the module."""

    own_options = config.FailoverOptions

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._own = self.own_options.read(options)
        self.max_ttl = self._own.max_ttl
        self._active = ActiveStore(
            options, self._own, self._other, self._prepare, self._switched, tell=self._told
        )
        self._refresher, self._leases = self._active.refresher, self._active.leases

    # Methods, because ``other`` and the ``report_`` functions are set only after the constructor.

    def _other(self, alias: str) -> BaseLockBackend:
        return self.other(alias)

    def _prepare(self, store: BaseLockBackend) -> None:
        store.other = self._other
        store.report_end, store.report_doubt = self._ended, self._switched

    def _ended(self, owner: str, outcome: Outcome) -> None:
        self.report_end(owner, outcome)

    def _switched(self) -> None:
        self.report_doubt()

    def _told(self, switch: StoreSwitch) -> None:
        self.report_switch(switch)

    @classmethod
    def aliases_named(cls, options: AliasOptions) -> tuple[str, ...]:
        named = (options.options.get("primary"), options.options.get("standby"))
        return tuple(alias for alias in named if isinstance(alias, str) and alias)

    # -- what both stores can do -------------------------------------------------------

    @property
    def _both(self) -> tuple[BaseLockBackend, BaseLockBackend]:
        return self.other(self._own.primary), self.other(self._own.standby)

    @property
    def capabilities(self) -> frozenset[Capability]:  # type: ignore[override]
        one, two = self._both
        return one.capabilities & two.capabilities

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        return all(store.is_shared for store in self._both)

    @property
    def renewals_per_call(self) -> int:  # type: ignore[override]
        return min(store.renewals_per_call for store in self._both)

    @property
    def heartbeat(self) -> float | None:  # type: ignore[override]
        beats = [store.heartbeat for store in self._both if store.heartbeat is not None]
        return min(beats, default=None)

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        return self._acquire(request, deadline=deadline).make()

    def _acquire(self, request: LeaseRequest, *, deadline: float) -> StoreCall[Lease | Contention]:
        try:
            view, term = self._active.open_term(request.name, deadline)
        except BackendUnavailable as error:
            # No store was asked.
            error.unsent = True
            raise
        asked = request
        if request.kind == "held":
            asked = request._replace(ttl=min(request.ttl, self.max_ttl))
        # Also before the answer, because that may be lost; the request is then cancelled.
        self._leases.add(request.owner, term, clock.now() + request.ttl)

        def meaning(answer: Lease | Contention) -> Lease | Contention:
            if isinstance(answer, Lease):
                return self._counted(answer, view, term, request)
            return answer._replace(ticket=(term, answer.ticket))

        call = partial(term.store.acquire, asked, deadline=deadline)
        return StoreCall(term.store, call, meaning)

    def _counted(self, lease: Lease, view: View, term: Term, request: LeaseRequest) -> Lease:
        """The lease, if it rests on this view.

        Raises:
            BackendUnavailable: This process stood still between reading the view and asking, or
                the store was switched while it waited.
        """
        if lease.asked_at >= view.valid_until or view.epoch != term.epoch:
            raise BackendUnavailable(
                "The active store may have been switched meanwhile", request.name, self.alias
            )
        term.granted_at = clock.now()
        check_token(lease.token, request.name, self.alias, term.active)
        ttl = lease.ttl
        if request.kind == "held":
            ttl = min(ttl, view.latest_end - lease.asked_at)
        self._leases.add(lease.owner, term, lease.asked_at + ttl)
        return lease._replace(token=term.token(lease.token), ttl=ttl)

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        term, met = self._met(contention)
        over = partial(self._is_over, term, interrupted)
        lease = term.store.wait(self._capped(request), met, until=until, interrupted=over)
        if lease is None:
            return None
        view = self._refresher.current(self.call_deadline())
        return self._counted(lease, view, term, request)

    async def async_wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        term, met = self._met(contention)
        over = partial(self._is_over, term, interrupted)
        wait = term.store.async_wait
        lease = await wait(self._capped(request), met, until=until, interrupted=over)
        if lease is None:
            return None
        view = self._refresher.valid()
        if view is None:
            raise BackendUnavailable(
                "The active store is not known any more", request.name, self.alias
            )
        return self._counted(lease, view, term, request)

    def _met(self, contention: Contention) -> tuple[Term, Contention]:
        term, ticket = cast(tuple[Term, object], contention.ticket)
        return term, contention._replace(ticket=ticket)

    def _capped(self, request: LeaseRequest) -> LeaseRequest:
        if request.kind != "held":
            return request
        return request._replace(ttl=min(request.ttl, self.max_ttl))

    def _is_over(self, term: Term, interrupted: Callable[[], bool]) -> bool:
        # Also keeps the view up to date while a caller only waits.
        self._refresher.valid()
        return self._leases.latest is not term or interrupted()

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        if renewals and self._leases.latest is None:
            self._active.term_of("", deadline)
        pending = TermRenewal(self._leases, renewals, process=process, deadline=deadline)
        pending.wait(max(0.0, deadline - clock.now()))
        return pending.result()

    def start_renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> PendingRenewal:
        # Also keeps the view up to date.
        self._refresher.valid()
        if renewals and self._leases.latest is None:
            # A thread may wait for the record.
            return super().start_renew(renewals, process=process, deadline=deadline)
        return TermRenewal(self._leases, renewals, process=process, deadline=deadline)

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Outcome:
        return self._release(name, owner, min_hold=min_hold, deadline=deadline).make()

    def _release(
        self, name: str, owner: str, *, min_hold: float, deadline: float
    ) -> StoreCall[Outcome]:
        def meaning(outcome: Outcome) -> Outcome:
            self._leases.discard(owner)
            return outcome

        store = self._active.term_of(owner, deadline).store
        call = partial(store.release, name, owner, min_hold=min_hold, deadline=deadline)
        return StoreCall(store, call, meaning)

    def release_many(self, releases: Sequence[ReleaseRequest], *, deadline: float) -> list[Outcome]:
        terms = {self._leases.of(each.owner) for each in releases}
        term = terms.pop() if len(terms) == 1 else None
        if term is None:
            return super().release_many(releases, deadline=deadline)
        outcomes = term.store.release_many(releases, deadline=deadline)
        for each in releases:
            self._leases.discard(each.owner)
        return outcomes

    def cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> None:
        self._cancel_acquire(request, deadline=deadline).make()

    def _cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> StoreCall[None]:
        # The owner is not forgotten, because the request may be cancelled again.
        store = self._active.term_of(request.owner, deadline).store
        return StoreCall(store, partial(store.cancel_acquire, request, deadline=deadline))

    def locked(self, name: str, *, deadline: float) -> bool:
        return self._locked(name, deadline=deadline).make()

    def _locked(self, name: str, *, deadline: float) -> StoreCall[bool]:
        _, term = self._active.open_term(name, deadline)
        return StoreCall(term.store, partial(term.store.locked, name, deadline=deadline))

    async def acall(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        prepare = AWAITED.get(method.__func__) if isinstance(method, MethodType) else None
        # Without a view, it would wait for the database.
        if prepare is None or self._refresher.valid(margin=0.1) is None:
            return await super().acall(method, *args, **kwargs)
        call: StoreCall[T] = prepare(self, *args, **kwargs)
        return await call.amake()

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._active.after_fork()

    def close_unused(self) -> None:
        for term in self._leases.terms():
            term.store.close_unused()

    def close(self) -> None:
        self._active.close()


AWAITED: dict[Callable[..., Any], Callable[..., StoreCall[Any]]] = {
    FailoverBackend.acquire: FailoverBackend._acquire,
    FailoverBackend.break_silently: FailoverBackend._break_silently,
    FailoverBackend.cancel_acquire: FailoverBackend._cancel_acquire,
    FailoverBackend.get: FailoverBackend._get,
    FailoverBackend.locked: FailoverBackend._locked,
    FailoverBackend.release: FailoverBackend._release,
}
"""Methods that coroutines can await without a thread, if the store can; and what they ask it."""
