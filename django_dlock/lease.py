"""The values that handle, watchdog and backend exchange about a lease.

What operators see and ask is in ``lease_info``; both are imported from here.

Nothing in this module does I/O or knows a backend. Most values are named tuples: to define one
takes a fifth of the time of a frozen dataclass, and instances are made faster, too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from . import clock
from .lease_info import (
    HOLDING,
    OWNER_PART,
    SEARCHED,
    SORT_KEYS,
    HolderState,
    Kind,
    LeaseInfo,
    LeasePage,
    LeaseQuery,
    Waiter,
    in_order,
)
from .process import ProcessIdentity

__all__ = [
    "HOLDING",
    "OWNER_PART",
    "SEARCHED",
    "SORT_KEYS",
    "Contention",
    "HolderState",
    "Kind",
    "Lease",
    "LeaseInfo",
    "LeasePage",
    "LeaseQuery",
    "LeaseRequest",
    "Outcome",
    "ReleaseRequest",
    "Renewal",
    "RenewalResult",
    "Waiter",
    "in_order",
]

Outcome = Literal["renewed", "released", "expired", "broken", "refused", "unknown"]
"""A backend's answer about a lease of the given owner.

``renewed``: the lease is prolonged. ``released``: the name is free now, or an earlier release of
the same owner had succeeded. ``expired``: its TTL was over. ``broken``: an operator, or a proof of
death, ended it. ``refused``: the name has another owner, or there is no trace of the lease (the
backend has lost its data). ``unknown``: the lease is gone, and the store does not remember how
leases ended; neither a success nor a loss."""


class LeaseRequest(NamedTuple):
    """The data of one acquire.

    Attributes:
        name: The lock's name.
        owner: A nonce, new for every acquire. So a repeated request whose first reply was lost
            finds its own grant, and no two grants share an owner.
        ttl: Seconds.
        kind: See ``Kind``.
        metadata: JSON object with the holder's context and the user's own data.
        waits: Whether the caller will wait if the name is taken; then the backend counts it as
            a waiter.
        replaces: Owner of a lease that the grant may replace in the same step, as when a retry
            takes over a parked lease. The name is also granted if it is free. Empty for none.
        renewed: Whether the lease will be renewed in the background. Then part of its TTL may
            have passed when it is granted to a waiter.
        since: When the caller began to wait, on ``clock.now()``.
    """

    name: str
    owner: str
    ttl: float
    kind: Kind = "held"
    metadata: str = "{}"
    waits: bool = False
    replaces: str = ""
    renewed: bool = False
    since: float = 0.0


class Lease(NamedTuple):
    """A grant limited in time.

    Attributes:
        token: The fencing token, strictly rising per name.
        ttl: Granted seconds, which may be fewer than requested.
        asked_at: When the confirmed request was *sent*, on ``clock.now()``.
    """

    name: str
    owner: str
    token: int
    ttl: float
    asked_at: float

    @property
    def deadline(self) -> float:
        """When the holder must treat it as lost, on ``clock.now()``.

        Counted from before the request, because the answer may arrive after the lease has ended.
        """
        return self.asked_at + self.ttl * (1 - clock.DRIFT)


class Contention(NamedTuple):
    """The answer that the name is held by someone else; not an error.

    Attributes:
        owner: The present owner; needed to break the lease if its process is proven dead. Empty if
            this request had a lease that has ended: its caller goes on with a new request.
        kind: Of the present lease.
        remaining: Seconds until that lease ends unless it is renewed.
        now: Seconds since the epoch on the backend's clock, to measure a time across processes
            (for a requeued task).
        process: The holder's process, if the backend knows it.
        ticket: Private data of the backend, which it gets back when the caller waits.
        proven_dead: The backend has proof that the holder's process is dead.
    """

    owner: str
    kind: Kind
    remaining: float
    now: float
    process: ProcessIdentity | None = None
    ticket: object = None
    proven_dead: bool = False


class Renewal(NamedTuple):
    """One lease to be renewed.

    Attributes:
        ttl: Seconds from the moment the request is sent; cut short by ``max_hold``.
        shorten: 0 for a renewal in the background, which never shortens a lease, however late it
            arrives. Otherwise the holder itself asks, and its renewals are numbered from 1. Then
            a lease with more time left is cut to this TTL; but to no less, even if the backend
            grants less, because the holder may miss the answer. A late copy, whose number is
            lower than the last one, shortens nothing.
    """

    name: str
    owner: str
    ttl: float
    shorten: int = 0


class RenewalResult(NamedTuple):
    """The answer to one ``Renewal``.

    Attributes:
        outcome: ``unanswered`` if a part of the store did not answer, so that this lease, unlike
            others of the same call, may or may not be prolonged.
        ttl: Seconds granted, from the moment the caller asked; 0 unless it was renewed.
    """

    outcome: Outcome | Literal["unanswered"]
    ttl: float = 0.0


class ReleaseRequest(NamedTuple):
    """One lease to be released.

    Attributes:
        min_hold: Seconds since the grant for which the name stays taken despite the release.
    """

    name: str
    owner: str
    min_hold: float = 0.0
