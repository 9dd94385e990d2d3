"""Whether the runs that records call running are: a killed process cannot write that it has ended.

Asks the backend of each alias once, however many records there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..lease import LeaseInfo
from ..models import IdempotencyRecord

RunState = Literal["alive", "silent", "dead", "unlocked", "unknown"]
"""``alive``: it holds its lock. ``silent``: it does, but its process gives no sign of life; it may
wake up. ``dead``: it does, and its process is proven dead. ``unlocked``: it holds its lock no
longer, so that the next delivery takes over. ``unknown``: the backend does not tell."""

INTERRUPTED: frozenset[RunState] = frozenset(["dead", "unlocked"])

RUNNING = IdempotencyRecord.State.RUNNING

_CHANGING = ("state", "attempt", "owner", "finished_at", "deaths", "ending")
NEEDED = ("lock_alias", "lock_name", *_CHANGING)
"""The columns that ``states_of`` reads."""
AT_ONCE = 500
"""Primary keys in one statement."""


def states_of(records: Iterable[IdempotencyRecord]) -> Mapping[int, RunState]:
    """The state of each run that is recorded as running, by the primary keys of the records.

    The records are of one database. If one has changed since it was read, it is refreshed, unless
    it is running again.
    """
    running = [record for record in records if record.state == RUNNING]
    names: dict[str, set[str]] = {}
    for record in running:
        names.setdefault(record.lock_alias, set()).add(record.lock_name)
    leases = {alias: _leases(alias, wanted) for alias, wanted in names.items()}
    found = {record.pk: _state_of(record, leases[record.lock_alias]) for record in running}
    # A run that has ended since the records were read has no lock any more, either.
    doubtful = [record for record in running if found[record.pk] in INTERRUPTED]
    for record in _changed(doubtful):
        del found[record.pk]
    return found


def _leases(alias: str, names: set[str]) -> Mapping[str, LeaseInfo] | None:
    """The leases on the names; ``None`` if nobody says."""
    try:
        return locks[alias].get_many(sorted(names))
    except (BackendUnavailable, InvalidLockBackend):
        return None


def _state_of(record: IdempotencyRecord, leases: Mapping[str, LeaseInfo] | None) -> RunState:
    if leases is None:
        return "unknown"
    info = leases.get(record.lock_name)
    # A parked lease has another owner: its run has ended.
    if info is None or info.owner != record.owner:
        return "unlocked"
    if info.holder_state in ("dead", "silent"):
        return info.holder_state
    return "alive"


def _changed(records: list[IdempotencyRecord]) -> list[IdempotencyRecord]:
    """Those that have changed since they were read, with what is there now."""
    if not records:
        return []
    using = IdempotencyRecord.objects.using(records[0]._state.db)
    now: dict[int, dict[str, Any]] = {}
    for start in range(0, len(records), AT_ONCE):
        keys = [record.pk for record in records[start : start + AT_ONCE]]
        rows = using.filter(pk__in=keys).values("pk", *_CHANGING)
        now |= {row.pop("pk"): row for row in rows}
    found = []
    for record in records:
        # One that was deleted is shown as it was.
        fresh = now.get(record.pk, {})
        if any(getattr(record, fact) != value for fact, value in fresh.items()) or not fresh:
            found.append(record)
            for fact, value in fresh.items():
                setattr(record, fact, value)
    return found
