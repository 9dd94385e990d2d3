"""What is wrong with the locks of a project, and what to do about it, for ``diagnose_locks``.

Each alias and each database is asked on a separate thread with a time limit, so that one that
does not answer does not hide the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from django.core import checks as django_checks
from django.db import connections, router

from .. import checks, conf
from ..backends.failover import FailoverBackend
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..models import IdempotencyRecord, LockEvent
from ..operators.findings import Finding, Severity, of_alias

__all__ = ["Finding", "diagnose_alias", "diagnose_project"]

TIMEOUTS = 10
"""How many ``command_timeout`` an alias may take in all; one that is down takes one."""
DATABASE_LIMIT = 5.0
"""Seconds for the questions to one database."""


def diagnose_alias(alias: str, *, read_only: bool = False) -> list[Finding]:
    """Ask the backend of one alias.

    Args:
        read_only: Take no lock.
    """
    try:
        backend = locks[alias]
    except InvalidLockBackend:
        return list(_of_messages(alias, checks.check_settings_of(alias)))
    found: list[Finding] = []

    def examine() -> None:
        for finding in of_alias(backend, read_only=read_only):
            found.append(finding)
            if finding.topic == "answer" and finding.severity == "error":
                return
        if isinstance(backend, FailoverBackend) and not read_only:
            found.append(_standby_of(backend))
        found.extend(_of_messages(alias, checks.check_settings_of(alias)))
        found.extend(_of_messages(alias, checks.check_alias(backend.options)))
        found.extend(_of_messages(alias, checks.check_shared_caches_of(backend.options)))

    limit = TIMEOUTS * backend.command_timeout
    trouble = _bounded(examine, limit)
    if trouble:
        hint = f"Run it again; if it fails, the server or BACKEND of DLOCKS[{alias!r}] is broken."
        return [*found, Finding(alias, "error", "answer", f"the questions failed: {trouble}", hint)]
    return list(found)


def _standby_of(backend: FailoverBackend) -> Finding:
    """Whether the store that is not active would grant locks after a switch."""
    seen = backend.read_record()
    standby = backend.standby_of(seen)
    try:
        backend.try_store(standby, seen)
    except BackendUnavailable as error:
        message = f"after a switch to {standby!r}, no lock could be acquired: {error}"
        hint = f"Run this with --using {standby}, and see the rights in the guide to fail-over."
        return Finding(backend.alias, "error", "standby", message, hint)
    message = f"{standby!r} grants locks as it would after a switch"
    return Finding(backend.alias, "ok", "standby", message)


def diagnose_project() -> Iterator[Finding]:
    """Check what belongs to no alias: settings, tasks, and the databases of the records."""
    yield from _of_messages("", checks.check_names())
    yield from _of_messages("", checks.check_project())
    yield from _of_messages("", checks.check_tasks())
    databases = {router.db_for_write(model) for model in (IdempotencyRecord, LockEvent)}
    for database in sorted(databases):
        if connections.settings[database]["ENGINE"] == conf.DUMMY_ENGINE:
            continue
        messages: list[django_checks.CheckMessage] = []
        trouble = _bounded(partial(_ask_database, database, messages), DATABASE_LIMIT)
        if trouble:
            message = f"the database {database!r} of records and lock events: {trouble}"
            hint = f"Start it, or correct DATABASES[{database!r}]."
            yield Finding("", "error", "database", message, hint)
        else:
            yield from _of_messages("", messages)


def _ask_database(database: str, messages: list[django_checks.CheckMessage]) -> None:
    try:
        messages += checks.check_migrations([database])
        messages += checks.check_records([database])
    finally:
        # Those of this thread.
        connections.close_all()


def _of_messages(alias: str, messages: Iterable[django_checks.CheckMessage]) -> Iterator[Finding]:
    for message in messages:
        if message.is_silenced():
            continue
        if message.level >= django_checks.ERROR:
            severity: Severity = "error"
        else:
            severity = "warning" if message.level >= django_checks.WARNING else "ok"
        yield Finding(alias, severity, message.id or "", message.msg, message.hint or "")


def _bounded(function: Callable[[], object], limit: float) -> str:
    """Call it on another thread; return why it did not end well, or an empty text."""
    outcome: list[str] = []

    def call() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - whatever a backend or a driver raises
            # A driver's text may have several lines.
            outcome.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
        else:
            outcome.append("")

    thread = threading.Thread(target=call, name="dlock-diagnosis", daemon=True)
    thread.start()
    thread.join(limit)
    return outcome[0] if outcome else f"no answer within {limit:g} s"
