"""Writes the lock events table: losses, take-overs, breaks, longest holds, long waits.

The receivers run on the events thread. The table is for looking things up later; a database
that does not answer costs the row and a log line, and holds up nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.db import DatabaseError, close_old_connections, connections, router
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
    # Now and not with the first row: what runs before a fork and has something to tell must be
    # registered later, see ``events.hook``.
    _hook()


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
        with _not_while_forking():
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


# A child that is forked while SQLite has a file open believes for ever in the locks that were
# held at that moment, by a thread that it does not have, and sooner or later writes over what
# another process writes. A worker's parent forks whenever a child has died, which is when there
# are events to write.
FORK_WAITS = 30.0
"""Seconds for which a fork waits for a row; longer than SQLite waits for its file."""

_open = threading.Lock()
_waited = False
_hooked = False


@contextmanager
def _not_while_forking() -> Iterator[None]:
    """Keep this process from forking while a SQLite file is open on this thread."""
    connection = connections[router.db_for_write(LockEvent)]
    if connection.vendor != "sqlite" or not hasattr(os, "register_at_fork"):
        yield
        return
    with _open:
        try:
            yield
        finally:
            # Whatever ``CONN_MAX_AGE`` says.
            connection.close()


def _hook() -> None:
    global _hooked
    # Twice, a fork would wait for itself.
    if not _hooked and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_begin)
    _hooked = True


def _wait() -> None:
    global _waited
    _waited = _open.acquire(timeout=FORK_WAITS)


def _go_on() -> None:
    if _waited:
        _open.release()


def _begin() -> None:
    global _open
    _open = threading.Lock()
