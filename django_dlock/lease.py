"""The facts of one lease, as they pass between handle, watchdog, backend and operator.

Only values live here: nothing in this module does I/O or knows a backend. Most are named tuples,
which cost a fifth of a frozen dataclass to define, at import, and less to make.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .process import ProcessIdentity

__all__ = [
    "SORT_KEYS",
    "Contention",
    "Fate",
    "HolderState",
    "Kind",
    "Lease",
    "LeaseInfo",
    "LeasePage",
    "LeaseQuery",
    "LeaseRequest",
    "Renewal",
    "in_order",
]

Kind = Literal["held", "cooling", "parked", "reserved"]
"""``held`` by a process; ``cooling`` after a release under ``min_hold``; ``parked`` between
retries of a task; ``reserved`` at enqueue time. Rules about dead processes and about exit
apply to ``held`` only."""

Fate = Literal["renewed", "released", "expired", "broken", "refused"]
"""What a backend answers about a lease that somebody claims to own.

``renewed``: it was theirs and lives on. ``released``: it was theirs and now is free, or an
earlier release of theirs did happen. ``expired``: it was theirs and its TTL ended. ``broken``:
an operator, or a proof of death, took it away. ``refused``: another owner, or no trace of it
(the backend lost its data)."""

HolderState = Literal["alive", "silent", "dead", "unknown"]
"""``alive``: heard of within 15 s. ``silent``: not heard of; it may wake up. ``dead``: proven.
``unknown``: the lease is of no process (cooling, parked, reserved) or names none."""


class LeaseRequest(NamedTuple):
    """What one attempt to acquire asks for.

    Attributes:
        name: The lock's name.
        owner: A nonce, new for every attempt, so that a retry whose first reply was lost finds
            its own grant, and no two grants ever share an owner.
        ttl: Seconds.
        kind: See ``Kind``.
        metadata: JSON object with the holder's context and the user's own facts.
        waits: The caller will wait if the name is taken: the backend counts it as a waiter.
        replaces: Owner of a lease that the grant may take the place of, in the same step; the
            name is granted where it is free, too. How a lease passes from hand to hand: parked
            and taken up again. Empty for nobody.
        renewed: The holder will have it renewed in the background, so that it may begin with a
            shorter TTL where it is handed over.
    """

    name: str
    owner: str
    ttl: float
    kind: Kind = "held"
    metadata: str = "{}"
    waits: bool = False
    replaces: str = ""
    renewed: bool = False


class Lease(NamedTuple):
    """A grant limited in time.

    Attributes:
        token: The fencing token, strictly rising per name.
        ttl: Seconds, as last confirmed.
        deadline: When the holder must believe it gone, on ``clock.now()``: the moment the
            confirmed request was *sent*, plus the TTL, less the drift.
    """

    name: str
    owner: str
    token: int
    ttl: float
    deadline: float


class Contention(NamedTuple):
    """Held by another: an answer, not an error.

    Attributes:
        owner: The present owner, to be named when its death is proven.
        kind: Of the lease in the way.
        remaining: Seconds until that lease ends unless it is renewed.
        now: Seconds since the epoch on the backend's clock, for those who must measure a time
            across processes (a requeued task).
        process: The holder's process, where the backend knows it.
        token: Of the lease in the way, where the backend hands leases over: what it gives to
            this waiter later has a higher one.
        asked_at: When the question was sent, on ``clock.now()``.
    """

    owner: str
    kind: Kind
    remaining: float
    now: float
    process: ProcessIdentity | None = None
    token: int = 0
    asked_at: float = 0.0


class Renewal(NamedTuple):
    """One lease to be renewed.

    Attributes:
        ttl: Seconds from the moment the request is sent; cut short by ``max_hold``.
    """

    name: str
    owner: str
    ttl: float


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One lease as an operator sees it, read in one go from the backend.

    Attributes:
        acquired_at: Aware; the backend's clock.
        age: Seconds since the grant.
        ttl: Seconds left; ``None`` for a damaged entry that would never end.
        renewals: How often it was renewed.
        waiting: How many wait for the name at the backend. The callers of one process stand in
            line in that process; only the first of them counts.
        process: The holder's process.
        holder_state: See ``HolderState``.
        metadata: The holder's context (``task_name``, ``task_id``, ``path``, ``user``) and the
            user's own facts.
        unheard: Seconds since the process was last heard of; ``None`` where that is not known.
    """

    name: str
    alias: str
    kind: Kind
    owner: str
    token: int
    acquired_at: dt.datetime
    age: float
    ttl: float | None
    renewals: int
    waiting: int
    process: ProcessIdentity | None
    holder_state: HolderState
    metadata: Mapping[str, Any] = field(default_factory=dict)
    unheard: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that commands print; its keys are part of the public interface."""
        process = self.process
        return {
            "name": self.name,
            "alias": self.alias,
            "kind": self.kind,
            "owner": self.owner,
            "token": self.token,
            "holder": {
                "host": process.host if process else None,
                "pid": process.pid if process else None,
                "task_name": self.metadata.get("task_name"),
                "task_id": self.metadata.get("task_id"),
                "path": self.metadata.get("path"),
                "user": self.metadata.get("user"),
            },
            "holder_state": self.holder_state,
            "acquired_at": self.acquired_at.isoformat(),
            "age": self.age,
            "ttl": self.ttl,
            "renewals": self.renewals,
            "waiting": self.waiting,
        }


SORT_KEYS: dict[str, Callable[[LeaseInfo], Any]] = {
    "name": lambda info: info.name,
    "alias": lambda info: info.alias,
    "kind": lambda info: info.kind,
    "holder": lambda info: (by.host, by.pid) if (by := info.process) else ("", 0),
    "holder_state": lambda info: info.holder_state,
    # Not the age itself: each alias tells that as of another moment. Of two grants at one moment
    # the token tells the younger.
    "age": lambda info: (-info.acquired_at.timestamp(), -info.token),
    # A damaged entry would never end: the longest of all.
    "ttl": lambda info: float("inf") if (left := info.ttl) is None else left,
    "renewals": lambda info: info.renewals,
    "token": lambda info: info.token,
    "waiting": lambda info: info.waiting,
}
"""By what leases can be sorted."""


@dataclass(frozen=True, slots=True)
class LeaseQuery:
    """Which leases an operator wants to see, and in which order.

    Attributes:
        prefix: Only names that begin so.
        contains: Only names in which this stands (exact case).
        kind, holder_state: Only these; empty for any.
        sort: Names in ``SORT_KEYS``, the weightiest first, with a ``-`` before those that shall
            fall. Equal ones, and all without it, stand in order of their grant.
    """

    prefix: str = ""
    contains: str = ""
    kind: str = ""
    holder_state: str = ""
    sort: Sequence[str] = ()

    def __post_init__(self) -> None:
        unknown = [key for key in self.sort if key.removeprefix("-") not in SORT_KEYS]
        if unknown or isinstance(self.sort, str):
            raise ValueError(f"sort is {self.sort!r}; it takes a sequence out of {list(SORT_KEYS)}")

    def matches(self, info: LeaseInfo) -> bool:
        return (
            info.name.startswith(self.prefix)
            and self.contains in info.name
            and self.kind in ("", info.kind)
            and self.holder_state in ("", info.holder_state)
        )


class LeasePage(NamedTuple):
    """Some of the leases that a query finds.

    Attributes:
        total: How many it finds in all.
    """

    infos: list[LeaseInfo]
    total: int


def in_order(infos: Iterable[LeaseInfo], sort: Sequence[str]) -> list[LeaseInfo]:
    """Sort as ``LeaseQuery.sort`` says; equal ones keep their places."""
    found = list(infos)
    for key in reversed(sort):
        found.sort(key=SORT_KEYS[key.removeprefix("-")], reverse=key.startswith("-"))
    return found
