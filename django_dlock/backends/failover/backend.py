"""Leases in a primary store or in a standby; a row in the database says which one is active.

``record`` has the row, ``rules`` says what a process may do with what it has read there, and
``terms`` has the stores.

* The fencing token is the epoch, which rises with every switch, in front of the store's token.
* After a switch, leases of the previous epoch are not renewed any more. They are in doubt at once,
  and lost at their deadline at the latest.
* Until all of them are over, nothing is granted, and nobody is told that a name is free.
* Parked and reserved leases, and names that are kept for ``min_hold``, are given up by a switch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

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
    Waiter,
)
from ..base import (
    AliasOptions,
    BaseLockBackend,
    Capability,
    Fact,
    PendingRenewal,
    Problem,
    RenewalResults,
)
from . import config
from .active import ActiveStore
from .record import Reading
from .refresher import on_own_connection
from .renewal import TermRenewal
from .rules import View
from .terms import Term

__all__ = ["FailoverBackend"]

TOKEN_BITS = 52
"""Bits of a store's token; the epoch is above them."""
AWAITED = frozenset({"acquire", "break_", "cancel_acquire", "get", "locked", "release"})
"""Methods that coroutines can await without a thread, if the store can."""


class _Call(NamedTuple):
    """A call of the store of a term, and what its answer means."""

    term: Term
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meaning: Callable[[Any], Any]


class FailoverBackend(BaseLockBackend):
    """See the module."""

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        self._own = config.FailoverOptions.read(options)
        self.max_ttl = self._own.max_ttl
        self._active = ActiveStore(options, self._own, self._other, self._prepare, self._switched)
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

    @classmethod
    def problems(cls, options: AliasOptions) -> list[Problem]:
        return config.problems(options)

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
        answer: Lease | Contention = self._ask("acquire", request, deadline=deadline)
        return answer

    def _acquire(self, request: LeaseRequest, *, deadline: float) -> _Call:
        view, term = self._active.open_term(request.name, deadline)
        asked = request
        if request.kind == "held":
            asked = request._replace(ttl=min(request.ttl, self.max_ttl))
        # Also before the answer, because that may be lost; the request is then cancelled.
        self._leases.add(request.owner, term, clock.now() + request.ttl)

        def meaning(answer: Lease | Contention) -> Lease | Contention:
            if isinstance(answer, Lease):
                return self._counted(answer, view, term, request)
            return answer._replace(ticket=(term, answer.ticket))

        return _Call(term, (asked,), {"deadline": deadline}, meaning)

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
        if lease.token >> TOKEN_BITS:
            raise BackendRefused(
                f"The store {term.active!r} gave the fencing token {lease.token}, which is too "
                f"large for fail-over: it must be less than 2 to the power of {TOKEN_BITS}",
                request.name,
                self.alias,
            )
        ttl = lease.ttl
        if request.kind == "held":
            ttl = min(ttl, view.latest_end - lease.asked_at)
        self._leases.add(lease.owner, term, lease.asked_at + ttl)
        return lease._replace(token=_token(term, lease.token), ttl=ttl)

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
        outcome: Outcome = self._ask("release", name, owner, min_hold=min_hold, deadline=deadline)
        return outcome

    def _release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> _Call:
        def meaning(outcome: Outcome) -> Outcome:
            self._leases.discard(owner)
            return outcome

        kwargs = {"min_hold": min_hold, "deadline": deadline}
        return _Call(self._active.term_of(owner, deadline), (name, owner), kwargs, meaning)

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
        self._ask("cancel_acquire", request, deadline=deadline)

    def _cancel_acquire(self, request: LeaseRequest, *, deadline: float) -> _Call:
        # The owner is not forgotten, because the request may be cancelled again.
        term = self._active.term_of(request.owner, deadline)
        return _Call(term, (request,), {"deadline": deadline}, _as_it_is)

    def locked(self, name: str, *, deadline: float) -> bool:
        return bool(self._ask("locked", name, deadline=deadline))

    def _locked(self, name: str, *, deadline: float) -> _Call:
        _, term = self._active.open_term(name, deadline)
        return _Call(term, (name,), {"deadline": deadline}, _as_it_is)

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        info: LeaseInfo | None = self._ask("get", name)
        return info

    def _get(self, name: str) -> _Call:
        _, term = self._active.open_term(name, self.call_deadline())
        return _Call(term, (name,), {}, lambda info: info and _info(term, info))

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        _, term = self._active.open_term("", self.call_deadline())
        return {name: _info(term, info) for name, info in term.store.get_many(names).items()}

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        _, term = self._active.open_term("", self.call_deadline())
        infos, total = term.store.page(query, offset=offset, limit=limit)
        return LeasePage([_info(term, info) for info in infos], total)

    def waiters(self, name: str, *, limit: int = 100) -> list[Waiter]:
        _, term = self._active.open_term(name, self.call_deadline())
        return term.store.waiters(name, limit=limit)

    def break_(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        return bool(self._ask("break_", name, owner=owner, deadline=deadline))

    def _break_(self, name: str, *, owner: str, deadline: float | None = None) -> _Call:
        deadline = deadline or self.call_deadline()
        _, term = self._active.open_term(name, deadline)
        return _Call(term, (name,), {"owner": owner, "deadline": deadline}, _as_it_is)

    def deregister(self, process: str, *, deadline: float) -> None:
        for term in self._leases.terms():
            if term is not self._leases.latest:
                # It may be the store that failed; then its leases end with their TTL.
                with contextlib.suppress(BackendUnavailable):
                    term.store.deregister(process, deadline=deadline)
        if self._leases.latest is not None:
            self._leases.latest.store.deregister(process, deadline=deadline)

    def store_problems(self) -> Sequence[Problem]:
        found: list[Problem] = []
        try:
            on_own_connection(
                self._active.record.read, self._active.record.database, self.command_timeout
            )
        except Exception as error:  # noqa: BLE001 - whatever the driver raises
            message = (
                f"The locks of alias {self.alias!r} cannot be acquired: the database "
                f"{self._active.record.database!r} does not say which store is active: {error}"
            )
            found.append(Problem("E012", message, "Run the command migrate for this database."))
        # What is wrong with the stores is reported for their own aliases.
        return found

    def facts(self, *, deadline: float) -> Sequence[Fact]:
        reading = self._refresher.current(deadline).reading
        other = self._own.other_than(reading.active)
        text = f"{reading.active!r} is active (epoch {reading.epoch}), {other!r} is the standby"
        return [Fact("fail-over", text)]

    # -- the active store --------------------------------------------------------------

    def read_record(self) -> Reading:
        """The record, read now on a connection of its own.

        Raises:
            django.db.Error, TimeoutError: The database does not answer.
            SwitchRefused: Other processes changed the record again and again.
        """
        return self._active.read_record()

    def switch(self, to: str, seen: Reading, *, reason: str = "by hand", by: str = "") -> None:
        """Make a store active, whatever its health.

        Args:
            to: The alias of the store.
            seen: What the decision rests on, from ``read_record``.
            by: Who switches.

        Raises:
            ValueError: It is not one of the two stores.
            SwitchRefused: The record has changed since it was read.
            django.db.Error, TimeoutError: No answer: the switch may have happened or not.
        """
        self._active.switch(to, seen, reason=reason, by=by)

    # -- calls ------------------------------------------------------------------------

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call: _Call = getattr(self, f"_{method}")(*args, **kwargs)
        answer = getattr(call.term.store, method)(*call.args, **call.kwargs)
        call.term.answered_at = clock.now()
        return call.meaning(answer)

    async def acall(self, method: str, *args: Any, **kwargs: Any) -> Any:
        # Without a view, the call would wait for the database.
        if method not in AWAITED or self._refresher.valid(margin=0.1) is None:
            return await super().acall(method, *args, **kwargs)
        call: _Call = getattr(self, f"_{method}")(*args, **kwargs)
        answer = await call.term.store.acall(method, *call.args, **call.kwargs)
        call.term.answered_at = clock.now()
        return call.meaning(answer)

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._active.after_fork()

    def close(self) -> None:
        self._active.close()


def _token(term: Term, token: int) -> int:
    return (term.epoch << TOKEN_BITS) | token


def _info(term: Term, info: LeaseInfo) -> LeaseInfo:
    return dataclasses.replace(info, token=_token(term, info.token))


def _as_it_is(answer: Any) -> Any:
    return answer
