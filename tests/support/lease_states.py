"""Drives several stores with the same calls, in search of one that they answer differently.

Redis has the states of a lease in Lua, the databases in ``rows.py`` and in SQL, and the local
backend in its own methods. ``lease_comparison`` says what must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as some
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from django_dlock.backends.base import BaseLockBackend
from django_dlock.lease import Kind, LeaseRequest, ReleaseRequest, Renewal
from tests.support.lease_comparison import (
    MOMENT,
    NAMES,
    TTLS,
    Comparison,
    Stores,
    broken,
    outlived,
    renew,
    soon,
)


def states(stores: Stores) -> Callable[[], RuleBasedStateMachine]:
    """Makes the machines, one for each example."""
    return lambda: _States(stores)


def known_paths(stores: Stores) -> None:
    """Calls that stores have answered differently before, or would with a known fault."""
    for name in NAMES:
        state = _States(stores)
        first = state.begins(name=name, ttl=9000.0)
        # A repeated request grants the whole TTL again.
        for number, ttl in ((1, 3000.0), (2, 1000.0), (0, 1000.0)):
            state.the_holder_renews(request=first, ttl=ttl, number=number, asks_again=number != 0)
            state.compare_all()
        # The break of a cooling name is not the end of the lease; nobody replaces its last owner.
        state.is_released(request=first, name=None, min_hold=5000.0, leave=0, again=True)
        facts = {"name": name, "ttl": 1000.0, "kind": "held", "note": ""}
        state.another_asks(**facts, waits=False, replaces="holder")
        state.compare_all()
        state.what_is_there_is_broken(name=name, leave=0)
        state.is_released(request=first, name=None, min_hold=0.0, leave=0, again=False)
        # A request whose lease has ended is over, whoever holds the name; one that was cancelled
        # before it had a lease has released none.
        second = state.another_asks(**facts, waits=False, replaces="")
        for then in ("ask", "release"):
            state.its_ttl_is_over(name=name, then=then, leave=0)
            state.cancelled(state.fresh(name))
            state.is_released(request=second, name=None, min_hold=0.0, leave=0, again=True)
            waiter = state.another_asks(**facts, waits=True, replaces="")
            state.the_same_asks_again(request=first, waits=True)
            cancelled = state.another_asks(**facts, waits=True, replaces="")
            state.is_cancelled(request=cancelled, leave=0)
            state.is_released(request=cancelled, name=None, min_hold=0.0, leave=0, again=False)
            state.is_released(request=waiter, name=None, min_hold=0.0, leave=0, again=True)
            second = state.another_asks(**facts, waits=False, replaces="")
            state.compare_all()


class _States(Comparison):
    """Each rule is a call, or what a caller does in several."""

    requests = Bundle("requests")
    some_owner = requests | some.sampled_from(
        [f"{which}:{name}" for which in ("holder", "last") for name in NAMES]
    )
    """A request; or that of the present holder of a name, or of the last one."""

    @invariant()
    def all_stores_tell_the_same(self) -> None:
        self.compare_all()

    @initialize(target=requests, name=some.sampled_from(NAMES), ttl=some.sampled_from(TTLS))
    def begins(self, name: str, ttl: float) -> LeaseRequest:
        request = self.fresh(name, ttl=ttl)
        self.acquire(request)
        return request

    @rule(
        target=requests,
        name=some.sampled_from(NAMES),
        ttl=some.sampled_from(TTLS),
        kind=some.sampled_from(("held", "held", "parked", "reserved")),
        waits=some.booleans(),
        replaces=some.sampled_from(("", "", "holder", "last")) | requests,
        note=some.text(max_size=3),
    )
    def another_asks(
        self,
        *,
        name: str,
        ttl: float,
        kind: Kind,
        waits: bool,
        replaces: LeaseRequest | str,
        note: str,
    ) -> LeaseRequest:
        if isinstance(replaces, str) and replaces:
            replaces = f"{replaces}:{name}"
        replaced = self.known([replaces] if replaces else [])
        request = self.fresh(
            name,
            ttl=ttl,
            kind=kind,
            waits=waits,
            replaces=replaced[0].owner if replaced else "",
            metadata=json.dumps({"note": note, "task_name": "shop.charge"}),
        )
        self.asks(request)
        return request

    @rule(request=some_owner, waits=some.booleans())
    def the_same_asks_again(self, request: LeaseRequest | str, waits: bool) -> None:
        for each in self.known([request]):
            self.asks(each._replace(waits=waits))

    @rule(
        asked=some.lists(some_owner, min_size=1, max_size=3, unique=True),
        name=some.none() | some.sampled_from(NAMES),
        ttl=some.sampled_from(TTLS),
    )
    def are_renewed(self, asked: list[LeaseRequest | str], name: str | None, ttl: float) -> None:
        """With a name: perhaps one that their owners never asked for."""
        known = self.known(asked)
        renewals = [Renewal(self.base + name if name else it.name, it.owner, ttl) for it in known]
        self.same(f"renew({renewals})", lambda one: renew(one, renewals))

    @rule(
        request=some_owner,
        ttl=some.sampled_from(TTLS),
        number=some.integers(1, 3),
        asks_again=some.booleans(),
    )
    def the_holder_renews(
        self, request: LeaseRequest | str, ttl: float, number: int, asks_again: bool
    ) -> None:
        for each in self.known([request]):
            renewals = [Renewal(each.name, each.owner, ttl, number)]
            self.same(f"renew({renewals})", lambda one: renew(one, renewals))  # noqa: B023
            if asks_again:
                self.asks(each)

    @rule(
        request=some_owner,
        name=some.none() | some.sampled_from(NAMES),
        min_hold=some.sampled_from((0.0, 0.0, 5000.0)),
        leave=some.integers(0, 2),
        again=some.booleans(),
    )
    def is_released(
        self,
        request: LeaseRequest | str,
        name: str | None,
        min_hold: float,
        leave: int,
        again: bool,
    ) -> None:
        for each in self.known([request]):
            of = name or self.label(each.name)
            line = self.line(of)
            for _ in range(1 + again):
                self.released(of, each.owner, min_hold)
            self.settled(of, line, leave)

    def released(self, name: str, owner: str, min_hold: float = 0.0) -> None:
        def release(one: BaseLockBackend) -> Any:
            return one.release(self.base + name, owner, min_hold=min_hold, deadline=soon(one))

        self.same(f"release({name}, {owner}, min_hold={min_hold})", release)

    @rule(
        asked=some.lists(some_owner, min_size=1, max_size=3, unique=True),
        min_hold=some.sampled_from((0.0, 0.0, 5000.0)),
    )
    def many_are_released(self, asked: list[LeaseRequest | str], min_hold: float) -> None:
        lines = {name: self.line(name) for name in NAMES}
        # A waiter to whom one of these releases hands the name over has not heard of that yet.
        asked = [it for it in self.known(asked) if it.owner not in lines[self.label(it.name)]]
        releases = [ReleaseRequest(it.name, it.owner, min_hold) for it in asked]
        self.same(
            f"release_many({releases})", lambda one: one.release_many(releases, deadline=soon(one))
        )
        for name in NAMES:
            self.settled(name, lines[name])

    @rule(request=some_owner, leave=some.integers(0, 2))
    def is_cancelled(self, request: LeaseRequest | str, leave: int) -> None:
        for each in self.known([request]):
            name = self.label(each.name)
            line = self.line(name)
            self.cancelled(each)
            self.settled(name, [owner for owner in line if owner != each.owner], leave)

    @rule(request=some_owner, name=some.sampled_from(NAMES), leave=some.integers(0, 2))
    def an_owner_is_broken(self, request: LeaseRequest | str, name: str, leave: int) -> None:
        for each in self.known([request]):
            self.is_broken(name, each.owner, leave)

    @rule(name=some.sampled_from(NAMES), leave=some.integers(0, 2))
    def what_is_there_is_broken(self, name: str, leave: int) -> None:
        info = self.seen(name)
        if info is not None:
            self.is_broken(name, info.owner, leave)

    def is_broken(self, name: str, owner: str, leave: int) -> None:
        line = self.line(name)
        self.same(f"break_({name}, {owner})", lambda one: broken(one, self.base + name, owner))
        self.settled(name, line, leave)
        self.released(name, owner)

    @rule(
        name=some.sampled_from(NAMES),
        then=some.sampled_from(("release", "renew", "break", "ask", "stranger", "list")),
        leave=some.integers(0, 2),
    )
    def its_ttl_is_over(self, name: str, then: str, leave: int) -> None:
        """Whatever comes next, before anybody else asks for the name."""
        info = self.seen(name)
        if info is None or info.kind == "cooling":
            return
        line, full, owner = self.line(name), self.base + name, info.owner
        self.number += 1
        last = [Renewal(full, owner, MOMENT, 100 + self.number)]
        self.same(f"renew({last})", lambda one: renew(one, last))
        for one in self.stores.values():
            outlived(one, full)
        self.seen(name)
        if then == "release":
            self.released(name, owner)
        elif then == "renew":
            self.same("renew, too late", lambda one: renew(one, last))
        elif then == "break":
            self.same("break, too late", lambda one: broken(one, full, owner))
        elif then == "ask":
            self.acquire(self.asked[owner])
            if line:
                # In a database, this has handed the name over.
                self.acquire(self.asked[line[0]])
                return
        elif then == "stranger" and line:
            self.overtaken(name, line)
        elif then == "list":
            self.compare_all()
        self.settled(name, line, leave)
        # As late as this, or later, its owner hears of the end.
        self.released(name, owner)

    @rule(
        kind=some.sampled_from(("held", "cooling", "parked", "reserved", "none such", "")),
        contains=some.sampled_from(("", "a", "shop", "none")),
        sort=some.sampled_from(((), ("name",), ("-age",), ("-waiting", "name"), ("-renewals",))),
        limit=some.sampled_from((None, 0, 1)),
    )
    def are_listed(
        self, kind: str, contains: str, sort: tuple[str, ...], limit: int | None
    ) -> None:
        asked: dict[str, Any] = {"prefix": self.base, "kind": kind, "contains": contains}
        self.same(
            f"list({asked}, {sort}, {limit})", lambda one: one.list(**asked, sort=sort, limit=limit)
        )
        self.same(f"count({asked})", lambda one: one.count(**asked))
        names = [self.base + name for name in (*NAMES, "c")]
        self.same("get_many", lambda one: dict(sorted(one.get_many(names).items())))
        for name in NAMES:
            self.same("waiters", lambda one, name=name: one.waiters(self.base + name, limit=1))
