"""Writes the table of lock events: losses, take-overs, breaks, ``max_hold``, long waits.

A thread of its own writes, so that a database that does not answer, or a table that a migration
has locked, delays nothing else. If a row cannot be written, it is lost and a line is logged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.db import Error, connections, router, transaction
from django.utils import timezone

from .. import clock, process, signals
from ..core import dispatch
from ..databases.errors import explained
from ..lease import LeaseInfo
from ..log import logger
from ..models import LockEvent
from ..text.printable import storable
from ..text.request_path import MAX_PATH

BY_HAND = frozenset({"operator", "command"})
"""With these reasons, the sender of ``broken`` has the row written, so that it learns of errors."""

PATIENCE = 5.0
"""Seconds that an operator waits for rows, after all of the leases are broken."""

COLUMNS = ("name", "alias", "owner", "token", "reason")
"""Arguments of a signal that have their own column."""


def is_defined(database: str) -> bool:
    """Whether the project has defined this database; it has no tables otherwise."""
    # Django uses this engine for an empty entry of DATABASES.
    return bool(connections.settings[database]["ENGINE"] != "django.db.backends.dummy")


def connect() -> None:
    """Connect the receivers; called once, when the apps are ready."""
    signals.lost.connect(_on_lost, dispatch_uid="django_dlock.operators.audit.lost")
    signals.broken.connect(_on_broken, dispatch_uid="django_dlock.operators.audit.broken")
    signals.waited_long.connect(_on_long_wait, dispatch_uid="django_dlock.operators.audit.waited")
    # Registered now, not with the first row: a fork hook that sends signals must be registered
    # after these; see ``dispatch.take_part_in_forks``.
    process.at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_begin)
    dispatch.take_part_in_forks()
    dispatch.call_receivers_at_once(_on_lost, _on_broken, _on_long_wait)


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
        user: The operator who did it; empty if nobody did.
        detail: More data, as JSON. Leave out the holder's user, because not everybody who may
            see events may see users.

    Raises:
        django.db.Error: The row may not have been written.
    """
    # A visitor chooses the path of a request, and others may write the store: none of them may
    # keep the row from being written, and so a lock from being released.
    texts = {"name": name, "alias": alias, "owner": owner or "", "reason": reason, "user": user}
    return LockEvent.objects.create(
        when=timezone.now(),
        event=event,
        token=token,
        detail={
            fact: storable(value) if isinstance(value, str) else value
            for fact, value in (detail or {}).items()
        },
        **{column: storable(text)[:255] for column, text in texts.items()},
    )


def record_break(info: LeaseInfo, reason: str, *, user: str = "") -> None:
    """Write the row about a lease that an operator breaks; see ``record``.

    Nothing if the project has no database.
    """
    if not is_defined(router.db_for_write(LockEvent)):
        return
    record(
        LockEvent.Event.BROKEN,
        name=info.name,
        alias=info.alias,
        owner=info.owner,
        token=info.token,
        reason=reason,
        user=user,
        detail={
            "holder_state": info.holder_state,
            "held_for": info.age,
            **_place(info.process),
            **_context(info.metadata),
        },
    )


class BreakRows:
    """The rows about leases that an operator has broken; no database delays the next break.

    They are written on another thread. SQLite takes one writer at a time, and that may be this
    thread, in a transaction; there, they are written at the end, and here.

    Args:
        reason, user: As of ``record_break``.
    """

    def __init__(self, reason: str, *, user: str = "") -> None:
        self._reason, self._user = reason, user
        self._database = router.db_for_write(LockEvent)
        self._rows: list[_BreakRow] = []

    def add(self, info: LeaseInfo) -> None:
        """Begin to write a row, unless the project has no database."""
        if not is_defined(self._database):
            return
        self._rows.append(row := _BreakRow(info))
        if not self._is_written_here:
            dispatch.rows.post(
                lambda: self._write(row), f"The lock event 'broken' of lock {info.name!r}"
            )

    def unwritten(self) -> dict[str, list[LeaseInfo]]:
        """Wait for the rows; returns each problem, with the leases whose row may be missing."""
        give_up_at = clock.now() + PATIENCE
        found: dict[str, list[LeaseInfo]] = {}
        for row in self._rows:
            if self._is_written_here and not row.ended.is_set() and clock.now() < give_up_at:
                # In a savepoint, so that an error does not end the transaction of a request.
                with _ending(row), transaction.atomic(using=self._database):
                    record_break(row.info, self._reason, user=self._user)
            if not row.ended.wait(max(0.0, give_up_at - clock.now())):
                # It may still be written, if this process goes on.
                row.problem = f"database {self._database!r} did not answer within {PATIENCE:g} s"
            if row.problem:
                found.setdefault(row.problem, []).append(row.info)
        return found

    @property
    def _is_written_here(self) -> bool:
        return connections[self._database].vendor == "sqlite"

    def _write(self, row: _BreakRow) -> None:
        with _ending(row):
            record_break(row.info, self._reason, user=self._user)


class _BreakRow:
    def __init__(self, info: LeaseInfo) -> None:
        self.info, self.problem = info, ""
        self.ended = threading.Event()


@contextmanager
def _ending(row: _BreakRow) -> Iterator[None]:
    """Note how the writing ends; a lease that is broken stays so, whatever a driver raises."""
    try:
        yield
    except Error as error:
        told = explained(error, router.db_for_write(LockEvent))
        row.problem = str(told) or type(told).__name__
    except Exception as error:  # noqa: BLE001 - as above
        row.problem = str(error) or type(error).__name__
    finally:
        row.ended.set()


def _context(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The task or the request. The user's own metadata may be large and is left out."""
    keys = ("task_name", "task_id", "path")
    return {key: storable(str(metadata[key]))[:MAX_PATH] for key in keys if metadata.get(key)}


def _place(of: process.ProcessIdentity | None) -> dict[str, str | int | None]:
    """Where the holder runs, or ran."""
    return {"host": of.host if of else None, "pid": of.pid if of else None}


def _on_lost(sender: object, *, reason: str, **facts: Any) -> None:
    event = LockEvent.Event.MAX_HOLD if reason == "max_hold" else LockEvent.Event.LOST
    _record_later(event, reason=reason, process=process.current(), **facts)


def _on_broken(sender: object, *, reason: str, **facts: Any) -> None:
    if reason in BY_HAND:
        return
    if "held_for" not in facts:
        # Sent by the waiter that takes over; its metadata says nothing of the dead holder.
        facts["metadata"] = None
    is_taken_over = reason == "holder_dead"
    event = LockEvent.Event.TAKEN_OVER if is_taken_over else LockEvent.Event.BROKEN
    _record_later(event, reason=reason, **facts)


def _on_long_wait(sender: object, **facts: Any) -> None:
    _record_later(LockEvent.Event.LONG_WAIT, process=process.current(), **facts)


def _record_later(event: str, **facts: Any) -> None:
    dispatch.rows.post(
        lambda: _try_to_record(event, **facts),
        f"The lock event '{event}' of lock {facts['name']!r}",
    )


def _try_to_record(event: str, *, metadata: Mapping[str, Any] | None = None, **facts: Any) -> None:
    if not is_defined(router.db_for_write(LockEvent)):
        return
    columns = {key: facts[key] for key in COLUMNS if key in facts}
    known = ("held_for", "holder_state", "waited")
    more = {key: facts[key] for key in known if facts.get(key) is not None}
    try:
        with not_while_forking(router.db_for_write(LockEvent)):
            place = _place(facts.get("process"))
            record(event, **columns, detail={**more, **place, **_context(metadata or {})})
    except Error as error:
        logger.warning(
            "The lock event '%s' of lock %r was not written: %s",
            event,
            facts["name"],
            explained(error, router.db_for_write(LockEvent)),
            task_id=(metadata or {}).get("task_id"),
            **{key: facts.get(key) for key in ("name", "alias", "owner", "token", "reason")},
        )


# If a process forks while SQLite has a file open, the child inherits SQLite's record of its file
# locks, which is wrong from then on, and may corrupt the file. The parent of a pool forks whenever
# a child has died, which is also when there are events to write.
FORK_WAITS = 30.0
"""Seconds for which a fork waits until a row is written; longer than SQLite waits for its file."""

_open = threading.Lock()
_waited = False


@contextmanager
def not_while_forking(database: str) -> Iterator[None]:
    """Keep this process from forking while a SQLite file is open on this thread."""
    connection = connections[database]
    if connection.vendor != "sqlite" or not hasattr(os, "register_at_fork"):
        yield
        return
    with _open:
        try:
            yield
        finally:
            # Even with ``CONN_MAX_AGE``.
            connection.close()


def _wait() -> None:
    global _waited
    _waited = _open.acquire(timeout=FORK_WAITS)


def _go_on() -> None:
    if _waited:
        _open.release()


def _begin() -> None:
    global _open
    _open = threading.Lock()
