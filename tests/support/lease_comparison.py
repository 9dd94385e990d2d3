"""Makes the same call of several stores, and compares what does not depend on time.

``DIFFERENCES`` lists what may differ. ``lease_states`` says which calls are made.

No lease ends by itself meanwhile: a TTL is so long that all that is left of it at the end of an
example is rounded away, or so short that each store is asked until it has ended.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hypothesis import assume
from hypothesis.stateful import RuleBasedStateMachine

from django_dlock import clock
from django_dlock.backends.base import BaseLockBackend
from django_dlock.lease import (
    Contention,
    Lease,
    LeaseInfo,
    LeaseRequest,
    Renewal,
    RenewalResult,
    Waiter,
)
from django_dlock.process import current

Stores = Mapping[str, BaseLockBackend]


class Difference(NamedTuple):
    """What stores may answer differently.

    Attributes:
        stores: Those that differ from the others.
        why: The reason.
        documented: What ``docs/reference/backends.md`` says of it.
    """

    stores: tuple[str, ...]
    why: str
    documented: str


DIFFERENCES = {
    "a free name with waiters": Difference(
        ("local",),
        "Its waiters are threads of one process, which the release wakes; the others hand the "
        "lease over in the step that ends the one before.",
        "The local backend wakes all waiters, and the first that asks gets the lock",
    ),
    "a lease that ended with its TTL": Difference(
        ("local", "redis"),
        "No step of the store ends such a lease, and all waiters ask at the same moment. A row of "
        "a database has its queue in it; Redis would need one more command for each acquire.",
        "a lease that ends with its TTL goes to the first that asks",
    ),
}

TTLS = (1000.0, 3000.0, 9000.0)
STEP = 500.0
"""What is left of a TTL is rounded to a multiple of this."""
MOMENT = 0.02
"""A TTL whose end the machine waits for."""
PATIENCE = 10.0
"""Seconds after which an example proves nothing: a waiter in a database loses its place when it has
not asked for 15 s, and the ends of leases are forgotten some day."""
NAMES = ("a", "b")


def rounded(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds / STEP)


class Comparison(RuleBasedStateMachine):
    """Makes a call of every store, and compares the answers; ``lease_states`` says which calls."""

    def __init__(self, stores: Stores) -> None:
        super().__init__()
        self.stores = stores
        self.base = f"{secrets.token_hex(6)}:"
        self.began_at = clock.now()
        self.asked: dict[str, LeaseRequest] = {}
        # Store and name → the owners' tokens, in the order of the grants.
        self.tokens: dict[tuple[str, str], dict[str, int]] = {}
        # Name → its holders, the present or the last one at the end.
        self.held: dict[str, list[str]] = {name: [""] for name in NAMES}
        # Those who left the line when the name had been handed over to them, in some stores.
        self.left: set[str] = set()
        self.number = 0

    # -- comparing ---------------------------------------------------------------------

    def same(
        self, what: str, call: Callable[[BaseLockBackend], Any], besides: Iterable[str] = ()
    ) -> Any:
        """The answer of all stores, except those that may differ."""
        answers = {store: self.answer(store, call) for store in self.stores if store not in besides}
        first = next(iter(answers.values()))
        if any(answer != first for answer in answers.values()):
            if clock.now() > self.began_at + PATIENCE:
                assume(False)
            told = "\n".join(f"  {store}: {answer}" for store, answer in answers.items())
            raise AssertionError(f"{what}:\n{told}")
        return first

    def answer(self, store: str, call: Callable[[BaseLockBackend], Any]) -> Any:
        try:
            return self.told(store, call(self.stores[store]))
        except Exception as error:
            # All stores must raise the same.
            return f"raises {type(error).__name__}"

    def told(self, store: str, answer: Any) -> Any:
        """What of an answer must be the same in every store."""
        if isinstance(answer, Lease):
            return (
                *("lease", self.label(answer.name), answer.owner, answer.ttl),
                self.rank(store, answer.name, answer.owner, answer.token),
            )
        if isinstance(answer, Contention):
            process = answer.process == current() if answer.owner else None
            left = rounded(answer.remaining)
            return ("contention", answer.owner, answer.kind, left, process, answer.proven_dead)
        if isinstance(answer, LeaseInfo):
            return (
                *("info", self.label(answer.name), answer.kind, answer.owner),
                self.rank(store, answer.name, answer.owner, answer.token),
                *(rounded(answer.ttl), rounded(answer.granted_ttl), answer.renewals),
                *(answer.waiting, answer.process == current(), answer.holder_state),
                *(dict(answer.metadata), answer.damaged, answer.unknown, answer.is_late),
                0 <= answer.age < 3600,
            )
        if isinstance(answer, Waiter):
            told = answer.process == current(), answer.state, answer.damaged
            return ("waiter", answer.owner, *told, dict(answer.metadata))
        if isinstance(answer, RenewalResult):
            return answer.outcome, answer.ttl
        if isinstance(answer, Mapping):
            return {self.label(name): self.told(store, info) for name, info in answer.items()}
        return [self.told(store, it) for it in answer] if isinstance(answer, list) else answer

    def rank(self, store: str, name: str, owner: str, token: int) -> str:
        """Whether the token is new, and whether it is higher than all before."""
        tokens = self.tokens.setdefault((store, name), {})
        if owner in tokens:
            return "the same token" if tokens[owner] == token else "another token"
        higher = all(token > other for other in tokens.values())
        tokens[owner] = token
        return "the same token" if higher else "a lower token"

    def known(self, asked: Iterable[LeaseRequest | str]) -> list[LeaseRequest]:
        """The requests that ``some_owner`` stands for, if all stores know the same of them."""
        owners = []
        for one in asked:
            if isinstance(one, str):
                which, _, name = one.partition(":")
                info = self.seen(name)
                now = info.owner if info else ""
                owners.append(
                    now
                    if which == "holder"
                    else next(it for it in self.held[name][::-1] if it != now or not it)
                )
            else:
                owners.append(one.owner)
        found = dict.fromkeys(owner for owner in owners if owner and owner not in self.left)
        return [self.asked[owner] for owner in found]

    def label(self, name: str) -> str:
        return name.removeprefix(self.base)

    # -- what is there -----------------------------------------------------------------

    def compare_all(self) -> None:
        for name in NAMES:
            info = self.seen(name)
            if info and info.owner != self.held[name][-1]:
                self.held[name].append(info.owner)
        self.same("list", lambda one: one.list(prefix=self.base))

    def seen(self, name: str, besides: Iterable[str] = ()) -> LeaseInfo | None:
        """Compare what is known of a name, and return it."""
        full = self.base + name
        found: list[LeaseInfo | None] = []

        def get(one: BaseLockBackend) -> LeaseInfo | None:
            found.append(one.get(full))
            return found[-1]

        self.same(f"get({name})", get, besides)
        self.same(f"locked({name})", lambda one: one.locked(full, deadline=soon(one)), besides)
        self.same(f"waiters({name})", lambda one: one.waiters(full), besides)
        return found[0]

    def line(self, name: str) -> list[str]:
        """The owners that wait for a name."""
        some_store = next(iter(self.stores.values()))
        return [waiter.owner for waiter in some_store.waiters(self.base + name)]

    def acquire(self, request: LeaseRequest) -> Any:
        what = f"acquire({self.label(request.name)}, {request})"
        return self.same(what, lambda one: one.acquire(request, deadline=soon(one)))

    def settled(self, name: str, line: list[str], leave: int = 0) -> None:
        """Let the first of the line take the name, if its lease has ended.

        Args:
            line: Who waited before the call that may have ended it.
            leave: How many of them leave before one takes it.
        """
        late = DIFFERENCES["a free name with waiters"].stores
        info = self.seen(name, besides=late)
        if not line or (info is not None and info.owner not in line):
            return
        # Handed over to the first; or nobody has asked since the lease ended with its TTL.
        assert info is None or info.owner == line[0], (info, line)
        for owner in line[:leave]:
            self.left.add(owner)
            self.cancelled(self.asked[owner])
            self.seen(name, besides=late)
        for owner in line[leave : leave + 1]:
            assert self.acquire(self.asked[owner])[0] == "lease"

    def cancelled(self, request: LeaseRequest) -> None:
        self.same("cancel", lambda one: one.cancel_acquire(request, deadline=soon(one)))

    def overtaken(self, name: str, line: list[str]) -> None:
        """Somebody who does not wait asks for a name whose lease has ended with its TTL."""
        differ = DIFFERENCES["a lease that ended with its TTL"].stores
        others = [store for store in self.stores if store not in differ]
        request = self.fresh(name)

        def ask(one: BaseLockBackend) -> Any:
            return one.acquire(request, deadline=soon(one))

        assert self.same("a stranger's acquire", ask, besides=others)[0] == "lease"
        if others:
            assert self.same("a stranger's acquire", ask, besides=differ)[1] == line[0]
        self.cancelled(request)

    # -- calls -------------------------------------------------------------------------

    def fresh(self, name: str, **facts: Any) -> LeaseRequest:
        request = LeaseRequest(self.base + name, secrets.token_hex(6), **{"ttl": 1000.0, **facts})
        self.asked[request.owner] = request
        return request

    def asks(self, request: LeaseRequest) -> None:
        name = self.label(request.name)
        line = self.line(name)
        self.acquire(request)
        self.settled(name, line)


def soon(one: BaseLockBackend) -> float:
    return clock.now() + 10 * one.command_timeout


def renew(one: BaseLockBackend, renewals: list[Renewal]) -> list[RenewalResult]:
    return list(one.renew(renewals, process=current().id, deadline=soon(one)))


def broken(one: BaseLockBackend, name: str, owner: str) -> tuple[Any, ...]:
    """The answer, and what the project is told."""
    told: list[Any] = []
    one.report_break = lambda alias, name, owner, info: told.append(  # type: ignore[method-assign]
        (name, owner, info is not None and info.owner)
    )
    try:
        return (one.break_(name, owner=owner), *told)
    finally:
        del one.report_break


def outlived(one: BaseLockBackend, name: str) -> None:
    give_up_at = clock.now() + 2 * PATIENCE
    while one.locked(name, deadline=soon(one)):
        assert clock.now() < give_up_at, "the lease does not end"
        threading.Event().wait(MOMENT / 4)


def listening(backend: BaseLockBackend) -> None:
    """Returns as soon as the process listens for leases that are handed over to it."""
    give_up_at = clock.now() + 2 * PATIENCE
    while clock.now() < give_up_at:
        deadline, name = clock.now() + PATIENCE, secrets.token_hex(8)
        holder = LeaseRequest(name, secrets.token_hex(6), 60.0)
        waiter = LeaseRequest(name, secrets.token_hex(6), 60.0, waits=True)
        backend.acquire(holder, deadline=deadline)
        met = backend.acquire(waiter, deadline=deadline)
        assert isinstance(met, Contention)
        backend.wait(waiter, met, until=clock.now() + 0.1, interrupted=lambda: False)
        backend.acquire(waiter, deadline=deadline)
        backend.release(name, holder.owner, min_hold=0.0, deadline=deadline)
        handed_over = backend.get(name)
        backend.cancel_acquire(waiter, deadline=deadline)
        if handed_over is not None:
            return
    raise AssertionError("the process does not listen")
