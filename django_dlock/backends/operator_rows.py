"""Makes the rows that operators see from what a store keeps of a lease or of a waiter.

So all stores judge a holder, a time that lies in the future, and text of another program in the
same way. Only the leases on Redis have rows of their own: a list reads no more than it shows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..lease import HolderState, Kind, LeaseInfo, Waiter
from ..lease_info import KINDS
from ..process import ProcessIdentity
from .holder_state import (
    SILENT_AFTER,
    holder_state,
    names_of,
    process_from_json,
    process_state,
    stored_object,
)

Judge: TypeAlias = Callable[[Kind, ProcessIdentity | None, bool, bool], HolderState]


def known_kind(kind: object) -> Kind:
    """The kind that is stored; anything but one of ``KINDS`` counts as ``held``."""
    return next((each for each in KINDS if each == kind), "held")


def lease_row(
    *,
    name: str,
    alias: str,
    kind: str = "held",
    owner: str,
    token: int,
    now: float,
    at: float,
    ttl: float | None,
    ttl_known: bool = True,
    granted_ttl: float | None = None,
    renewals: int | None = None,
    waiting: int | None = None,
    process: ProcessIdentity | str | None = None,
    metadata: object = "{}",
    silent_for: float | None = None,
    deregistered: bool = False,
    signs_of_life: bool = True,
    damaged: Sequence[str] = (),
    judge: Judge = holder_state,
) -> LeaseInfo:
    """One lease.

    Args:
        kind: See ``known_kind``.
        now, at: When it was read and when it was granted: seconds since the epoch, by the store's
            clock.
        ttl: See ``LeaseInfo``; the most that may be left unless ``ttl_known``.
        renewals, waiting: ``None`` if the store does not know.
        process: ``ProcessIdentity``, or the JSON of its ``as_dict``.
        metadata: ``LeaseRequest.metadata``, as it was stored.
        silent_for: ``None`` if the store has no heartbeats: then a holder is never silent.
        deregistered: The process has reported its normal end.
        signs_of_life: Whether the store shows that the holder's process lives; without them, its
            state is ``unknown`` unless its death is proven.
        damaged: What else than ``kind``, ``process`` and ``metadata`` is.
        judge: ``holder_state``, or a cached one for a list with many leases of one process.
    """
    at = max(0.0, min(at, now))
    known, identity, facts = known_kind(kind), _identity(process), stored_object(metadata)
    silent = silent_for is not None and silent_for > SILENT_AFTER
    state = judge(known, identity, silent, deregistered)
    wrong_process = bool(process) and identity is None
    return LeaseInfo(
        name=name,
        alias=alias,
        kind=known,
        owner=owner,
        token=token,
        acquired_at=dt.datetime.fromtimestamp(at, tz=dt.timezone.utc),
        age=now - at,
        ttl=ttl,
        renewals=max(0, renewals or 0),
        waiting=waiting or 0,
        process=identity,
        holder_state=state if signs_of_life or state == "dead" else "unknown",
        metadata=facts.value,
        silent_for=silent_for,
        granted_ttl=granted_ttl,
        damaged=(
            *names_of(kind=known != kind),
            *damaged,
            *names_of(process=wrong_process, metadata=not facts.is_sound),
        ),
        unknown=names_of(renewals=renewals is None, ttl=not ttl_known, waiting=waiting is None),
    )


def waiter_row(
    *,
    name: str,
    alias: str,
    owner: str,
    now: float,
    since: float,
    process: ProcessIdentity | str | None = None,
    metadata: object = "{}",
    silent: bool = False,
    listens: bool = False,
    deregistered: bool = False,
    damaged: Sequence[str] = (),
) -> Waiter:
    """One waiter; other arguments are those of ``lease_row``.

    Args:
        listens: A connection, which ends with its process, shows that it lives.
    """
    since = max(0.0, min(since, now))
    identity, facts = _identity(process), stored_object(metadata)
    state = process_state(identity, silent and not listens, deregistered)
    wrong_process = bool(process) and identity is None
    return Waiter(
        name=name,
        alias=alias,
        owner=owner,
        since=dt.datetime.fromtimestamp(since, tz=dt.timezone.utc),
        waited=now - since,
        process=identity,
        state="alive" if listens and identity is None else state,
        metadata=facts.value,
        damaged=(*damaged, *names_of(process=wrong_process, metadata=not facts.is_sound)),
    )


def _identity(stored: ProcessIdentity | str | None) -> ProcessIdentity | None:
    return stored if isinstance(stored, ProcessIdentity) else process_from_json(stored)
