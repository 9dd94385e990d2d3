"""What a run asks of its record, and the answers: claimed, finished, or in flight.

Values only; ``idempotency`` reads and writes the record.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from django.db import models

from ..exceptions import LockError
from ..models import IdempotencyRecord

E = TypeVar("E", bound=LockError)


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The data of a run that is to begin.

    Attributes:
        scope, key: Identify the work; compared exactly. The scope is full: with that of the
            tenant in front.
        payload: Fingerprint of the arguments; stored as ``payloads.keyed`` makes it. Another one
            with the same key is an error.
        ttl: How long the record is kept after the last write.
        lock_alias, lock_name, owner, token: The lease under which the run begins. ``owner`` is
            a nonce, so it identifies this run.
        task_id: Runs with the same task id belong to one task. Their payloads may differ,
            because a retry may have other arguments.
        is_copy: Whether its message may be a copy of one that has run: redelivered, or requeued.
        step: How often the task has replaced itself before this run. A replacement has the id of
            the task that it replaces; the step distinguishes it from a redelivery.
        worker, message: For operators: the process that runs it, and the text from which its task
            can be published again.
        max_attempts: How many runs may die in the middle before the key fails.
        stays_exhausted: Whether the key stays failed then, until its record is forgotten, because
            every run is of the same request. A task may have been sent anew.
        ended: Owner of an earlier run of the same message, which did not die, but whose end could
            not be recorded in an outage of the database; empty if there is none.
    """

    scope: str
    key: str
    payload: str
    ttl: dt.timedelta
    lock_alias: str
    lock_name: str
    owner: str
    token: int | None = None
    task_id: str = ""
    is_copy: bool = False
    step: int = 0
    worker: str = ""
    message: str | None = None
    max_attempts: int = 5
    stays_exhausted: bool = False
    ended: str = ""

    def error(self, kind: type[E], text: str) -> E:
        """An error about the key that also names the lock."""
        text = f"Key {self.key!r} in scope {self.scope!r} {text}"
        return kind(text, self.lock_name, self.lock_alias)


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run, until a later attempt is claimed.

    Attributes:
        attempt: Increases with every run of the key; a run can end only the latest attempt.
        deaths: How many earlier runs died in the middle.
        using: The record's database.
    """

    record_id: int
    attempt: int
    deaths: int
    request: ClaimRequest
    using: str

    def record(self) -> models.QuerySet[IdempotencyRecord]:
        """The record, if this run is still the latest."""
        # Compare the owner, too: a record that was forgotten and created again has attempt 1
        # again, and some databases reuse primary keys.
        return IdempotencyRecord.objects.using(self.using).filter(
            pk=self.record_id, attempt=self.attempt, owner=self.request.owner
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """The work of the key is done.

    Attributes:
        result, ending: What ``complete`` was given.
        task_id: Of the run that did the work.
    """

    result: str
    task_id: str = ""
    ending: str = ""
    record_id: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Another run is in progress: its owner still holds the lock, or its replacement continues."""

    lock_alias: str
    lock_name: str
    owner: str
    task_id: str = ""


Holds = Callable[[str, str, str], bool]
"""``holds(alias, name, owner)``: whether the backend says that the owner holds the name now.

It raises ``BackendUnavailable`` if there is no answer; then the key is not claimed."""
