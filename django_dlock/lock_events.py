"""Writes the lock events table: losses, take-overs, breaks, longest holds, long waits.

The receivers run on the events thread. The table is for looking things up later; a database
that does not answer costs the row and a log line, and holds up nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from django.db import DatabaseError, close_old_connections
from django.utils import timezone

from . import signals
from .lease import LeaseInfo
from .models import LockEvent

__all__ = ["BY_HAND", "connect", "facts", "record"]

logger = logging.getLogger("django_dlock")

BY_HAND = frozenset({"operator", "command"})
"""Reasons of ``broken`` whose sender has written the row itself, where it can be checked."""


def connect() -> None:
    """Listen to the signals that end in a row; called once, when the apps are ready."""
    signals.lost.connect(_on_lost, dispatch_uid="django_dlock.lock_events.lost")
    signals.broken.connect(_on_broken, dispatch_uid="django_dlock.lock_events.broken")
    signals.waited_long.connect(_on_long_wait, dispatch_uid="django_dlock.lock_events.waited")


def record(
    event: str,
    *,
    name: str,
    alias: str,
    owner: str | None = "",
    token: int | None = None,
    reason: str = "",
    user: str = "",
    detail: Mapping[str, Any] | None = None,
) -> LockEvent:
    """Write one row.

    Args:
        event: One of ``LockEvent.Event``.
        user: The operator who did it; empty for what happened by itself.
        detail: More facts, for JSON. The holder's own user does not belong here: not everybody
            who may see events may see users.

    Raises:
        DatabaseError: Nothing was written.
    """
    return LockEvent.objects.create(
        when=timezone.now(),
        event=event,
        name=name,
        alias=alias,
        owner=owner or "",
        token=token,
        reason=reason[:255],
        user=user,
        detail=dict(detail or {}),
    )


def facts(info: LeaseInfo) -> dict[str, Any]:
    """What a row about an ended lease says of its holder, besides its user."""
    process = info.process
    return {
        "holder_state": info.holder_state,
        "held_for": info.age,
        "host": process.host if process else None,
        "pid": process.pid if process else None,
        **_context(info.metadata),
    }


def _context(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The task or the request; the user's own facts may be large and stay out."""
    keys = ("task_name", "task_id", "path")
    return {key: str(metadata[key]) for key in keys if metadata.get(key)}


def _on_lost(sender: object, *, reason: str, **facts: Any) -> None:
    event = LockEvent.Event.MAX_HOLD if reason == "max_hold" else LockEvent.Event.LOST
    _try_to_record(event, reason=reason, **facts)


def _on_broken(sender: object, *, reason: str, **facts: Any) -> None:
    if reason not in BY_HAND:
        _try_to_record(LockEvent.Event.TAKEN_OVER, reason=reason, **facts)


def _on_long_wait(sender: object, **facts: Any) -> None:
    _try_to_record(LockEvent.Event.LONG_WAIT, **facts)


def _try_to_record(
    event: str,
    *,
    name: str,
    alias: str,
    reason: str = "",
    owner: str | None = None,
    token: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **facts: Any,
) -> None:
    times = {key: facts[key] for key in ("held_for", "waited") if facts.get(key) is not None}
    # This thread sees no request begin or end, which is when Django would do it.
    close_old_connections()
    try:
        record(
            event,
            name=name,
            alias=alias,
            owner=owner,
            token=token,
            reason=reason,
            detail={**times, **_context(metadata or {})},
        )
    except DatabaseError as error:
        logger.warning("The event %s of lock %r was not written: %s", event, name, error)
    finally:
        close_old_connections()
