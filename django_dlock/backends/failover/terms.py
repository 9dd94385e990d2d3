"""The stores of the epochs: each epoch has a key prefix of its own in the store that is active.

So leases that were left behind in a store, such as those of tasks between two retries, do not
count again when that store becomes active again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ... import clock
from ..base import BaseLockBackend
from .rules import View

T = TypeVar("T")

TOKEN_BITS = 52
"""Bits of a store's token; the epoch is above them."""

OWNERS_KEPT = 1000
"""Owners are remembered up to this number; then those whose leases are over are dropped."""


def _as_it_is(answer: T) -> T:
    return answer


@dataclass(eq=False)
class Term:
    """One epoch, as far as this process takes part in it.

    Attributes:
        active: The alias of its store.
        store: A backend of its own, with connections of its own.
        latest_end: No lease of this process may end later; rises with every read of the record.
        granted_at: When the store last granted a lease to this process.
    """

    epoch: int
    active: str
    store: BaseLockBackend
    latest_end: float
    granted_at: float = float("-inf")

    def token(self, token: int) -> int:
        """The token with the epoch in front of it."""
        return (self.epoch << TOKEN_BITS) | token


@dataclass(slots=True)
class StoreCall(Generic[T]):
    """A call of the store of a term, and what its answer means."""

    store: BaseLockBackend
    call: partial[T]
    meaning: Callable[[T], T] = _as_it_is

    def make(self) -> T:
        return self.meaning(self.call())

    async def amake(self) -> T:
        call = self.call
        return self.meaning(await self.store.acall(call.func, *call.args, **call.keywords))


class Leases:
    """The terms, and which of them each owner belongs to.

    Args:
        make: Makes a separate store for an alias and an epoch.
    """

    def __init__(self, make: Callable[[str, int], BaseLockBackend]) -> None:
        self._make = make
        self.latest: Term | None = None
        self._terms: dict[int, Term] = {}
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, which holds none of its parent's leases."""
        # Another thread of the parent may have held the lock during the fork.
        self._lock = threading.RLock()
        self._owners: dict[str, tuple[Term, float]] = {}
        self._prune_at = OWNERS_KEPT

    def term(self, view: View) -> tuple[Term, bool]:
        """The term of a view, and whether it has just begun."""
        term = self._terms.get(view.epoch)
        if term is not None:
            term.latest_end = max(term.latest_end, view.latest_end)
            return term, False
        with self._lock:
            if view.epoch in self._terms:
                return self._terms[view.epoch], False
            store = self._make(view.active, view.epoch)
            term = self._terms[view.epoch] = Term(view.epoch, view.active, store, view.latest_end)
            began = self.latest is None or view.epoch > self.latest.epoch
            if began:
                self.latest = term
        return term, began

    def add(self, owner: str, term: Term, end: float) -> None:
        self._owners[owner] = (term, end)
        if len(self._owners) >= self._prune_at:
            self._prune()

    def discard(self, owner: str) -> None:
        self._owners.pop(owner, None)

    def of(self, owner: str) -> Term | None:
        """The term in which this owner was granted a lease or asked for it; else the latest one."""
        found = self._owners.get(owner)
        return self.latest if found is None else found[0]

    def terms(self) -> list[Term]:
        return list(self._terms.values())

    def close_old(self) -> None:
        """Close the stores of terms whose leases are over."""
        now, latest = clock.now(), self.latest
        for term in self.terms():
            if term is not latest and now > term.latest_end + 60:
                self._terms.pop(term.epoch, None)
                term.store.close()

    def _prune(self) -> None:
        now = clock.now()
        for owner, (_, end) in self._owners.copy().items():
            if end < now:
                self._owners.pop(owner, None)
        self._prune_at = 2 * len(self._owners) + OWNERS_KEPT


def store_for(like: BaseLockBackend, alias: str, epoch: int) -> BaseLockBackend:
    """A copy of a backend that has this alias, and the key prefix of the epoch."""
    options = like.options
    # The first epoch uses the prefix unchanged. So during a deployment, processes that do not use
    # fail-over yet exclude those that do.
    prefix = options.key_prefix if epoch == 1 else f"{options.key_prefix}.{epoch}"
    return type(like)(dataclasses.replace(options, alias=alias, key_prefix=prefix))
