"""Makes the rows that operators see from what a store keeps of a lease or of a waiter.

So the backends judge a holder, a time that lies in the future, and text of another program in the
same way. Only Redis makes its rows itself: a list reads no more of a lease than it shows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ..lease import HolderState, Kind, LeaseInfo, Waiter
from ..lease_info import KINDS
from ..process import ProcessIdentity
from .holder_state import SILENT_AFTER, holder_state, process_state

__all__ = ["Judge", "known_kind", "lease_row", "waiter_row"]

Judge: TypeAlias = Callable[[Kind, ProcessIdentity | None, bool, bool], HolderState]


def known_kind(kind: object) -> Kind:
    """The kind that is stored; anything but one of ``KINDS`` counts as ``held``."""
    return next((each for each in KINDS if each == kind), "held")


def lease_row(
    *,
    name: str,
    alias: str,
    kind: str,
    owner: str,
    token: int,
    now: float,
    at: float,
    ttl: float | None,
    granted_ttl: float | None,
    renewals: int,
    waiting: int,
    process: ProcessIdentity | None,
    metadata: Mapping[str, Any],
    silent_for: float | None = None,
    deregistered: bool = False,
    signs_of_life: bool = True,
    damaged: Sequence[str] = (),
    unknown: Sequence[str] = (),
    judge: Judge = holder_state,
) -> LeaseInfo:
    """One lease.

    Args:
        kind: See ``known_kind``.
        now, at: When it was read and when it was granted: seconds since the epoch, by the store's
            clock.
        silent_for: ``None`` if the store has no heartbeats: then a holder is never silent.
        deregistered: The process has reported its normal end.
        signs_of_life: Whether the store shows that the holder's process lives; without them, its
            state is ``unknown`` unless its death is proven.
        judge: ``holder_state``, or a cached one for a list with many leases of one process.
    """
    at = max(0.0, min(at, now))
    known = known_kind(kind)
    silent = silent_for is not None and silent_for > SILENT_AFTER
    state = judge(known, process, silent, deregistered)
    return LeaseInfo(
        name=name,
        alias=alias,
        kind=known,
        owner=owner,
        token=token,
        acquired_at=dt.datetime.fromtimestamp(at, tz=dt.timezone.utc),
        age=now - at,
        ttl=ttl,
        renewals=max(0, renewals),
        waiting=waiting,
        process=process,
        holder_state=state if signs_of_life or state == "dead" else "unknown",
        metadata=metadata,
        silent_for=silent_for,
        granted_ttl=granted_ttl,
        damaged=tuple(damaged),
        unknown=tuple(unknown),
    )


def waiter_row(
    *,
    name: str,
    alias: str,
    owner: str,
    now: float,
    since: float,
    process: ProcessIdentity | None,
    metadata: Mapping[str, Any],
    silent: bool = False,
    deregistered: bool = False,
    damaged: Sequence[str] = (),
) -> Waiter:
    """One waiter; the arguments are those of ``lease_row``."""
    since = max(0.0, min(since, now))
    return Waiter(
        name=name,
        alias=alias,
        owner=owner,
        since=dt.datetime.fromtimestamp(since, tz=dt.timezone.utc),
        waited=now - since,
        process=process,
        state=process_state(process, silent, deregistered),
        metadata=metadata,
        damaged=tuple(damaged),
    )
