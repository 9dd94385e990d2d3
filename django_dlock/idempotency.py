"""The idempotency record: claim, complete, wait, fail, forget, purge.

Whether a run counts is decided here, in the record's own database, by the record's attempt
alone; never by the state of a lease, a queue or a result backend. Every write is one
conditional statement that names the attempt it was made for, so none needs a lock of its own::

    run A   claim → attempt 1 … stopped ……………………………… complete(attempt 1): 0 rows → StaleToken
    run B                       lease gone, claim → attempt 2 … complete(attempt 2): 1 row

Times are the database's own (``Now()``). Nothing here knows a task or a view; results are
text that the caller has encoded.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from django.conf import settings
from django.db import IntegrityError, connections, models, router, transaction
from django.db.models import functions

from .exceptions import AttemptsExhausted, LockError, PayloadMismatch, StaleToken
from .models import IdempotencyRecord

__all__ = [
    "Claim",
    "ClaimRequest",
    "Finished",
    "InFlight",
    "claim",
    "complete",
    "fail",
    "has_succeeded",
    "purge",
    "wait",
]

State: TypeAlias = IdempotencyRecord.State
Records: TypeAlias = models.QuerySet[IdempotencyRecord]


class Now(functions.Now):
    """The database's time as Django stores times; MySQL's is in the zone of its server."""

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        template = "UTC_TIMESTAMP(6)" if settings.USE_TZ else "CURRENT_TIMESTAMP(6)"
        return self.as_sql(compiler, connection, template=template, **extra)


_RACES = 100
"""How many other writers a claim lets pass before it gives up; each of them made progress."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What a run that wants to begin says of itself.

    Attributes:
        scope, key: What the work is called; compared exactly.
        payload: Fingerprint of the arguments. Another one under the same key is an error.
        ttl: How long the record is kept after it was last written.
        lock_alias, lock_name, owner, token: The lease under which the run begins. ``owner`` is
            a nonce, so it names this run and no other.
        max_attempts: How many runs may die in the middle before the key is given up.
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
    max_attempts: int = 5


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run, until somebody claims a later attempt.

    Attributes:
        attempt: Rises with every run of the key; the fence of its record.
        deaths: How many runs before this one died in the middle.
        using: The record's database.
    """

    record_id: int
    attempt: int
    deaths: int
    request: ClaimRequest
    using: str

    def record(self) -> Records:
        """The record, if this run still is the latest."""
        # The owner as well: a record that was forgotten and made anew counts from 1 again,
        # and some databases use a primary key twice.
        return _records(self.using).filter(
            pk=self.record_id, attempt=self.attempt, owner=self.request.owner
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """The key has been worked off.

    Attributes:
        result: What ``complete`` was given.
        task_id: Of the run that did it.
    """

    result: str
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Another run is under way, and the backend says that its owner still holds."""

    lock_alias: str
    lock_name: str
    owner: str


Holds = Callable[[str, str, str], bool]
"""``holds(alias, name, owner)``: whether the backend says that the owner holds the name now.

Raises ``BackendUnavailable`` where it does not answer; the record is then not taken over."""


def claim(
    request: ClaimRequest, *, holds: Holds, using: str | None = None
) -> Claim | Finished | InFlight:
    """Begin a run of a key, unless it is done or under way.

    Works inside and outside ``transaction.atomic()``. Outside, the claim is committed before
    this returns, so that a run that dies is counted. An expired record counts as absent.

    Raises:
        PayloadMismatch: The key is known with another payload.
        AttemptsExhausted: As many runs as allowed died in the middle; the record is failed now.
        BackendUnavailable: A run is recorded, and whether its owner lives cannot be told.
    """
    using = using or router.db_for_write(IdempotencyRecord)
    for race in range(_RACES):
        # Of a caller's transaction that sees only what was there when it began, a read that
        # locks sees the present, on MySQL; and PostgreSQL says that it cannot.
        locking = race > 0 and connections[using].in_atomic_block
        record = _read(request, using, locking=locking)
        if record is None:
            claimed = _insert(request, using)
        elif record.expired and record.state != State.RUNNING:
            claimed = _begin(record, request, using, deaths=0)
        elif record.payload != request.payload and not record.expired:
            raise PayloadMismatch(
                f"key {request.key!r} in scope {request.scope!r} was used with another payload",
                request.lock_name,
                request.lock_alias,
            )
        elif record.state == State.SUCCEEDED:
            return Finished(record.result, record.task_id)
        elif record.state != State.RUNNING:
            deaths = 0 if record.state == State.FAILED else record.deaths
            claimed = _begin(record, request, using, deaths=deaths)
        elif holds(record.lock_alias, record.lock_name, record.owner):
            return InFlight(record.lock_alias, record.lock_name, record.owner)
        elif record.deaths + 1 >= request.max_attempts:
            _give_up(record, request, using)
            continue
        else:
            claimed = _begin(record, request, using, deaths=record.deaths + 1)
        if claimed is not None:
            return claimed
        # Somebody else wrote first; see what they made of it.
    raise LockError(
        f"key {request.key!r} in scope {request.scope!r} changed {_RACES} times during one claim",
        request.lock_name,
        request.lock_alias,
    )


def complete(claim: Claim, result: str = "") -> None:
    """Record the run as succeeded; in the transaction of its effects where there is one.

    Raises:
        StaleToken: A later attempt was claimed, or the record was forgotten: this run does not
            count. Raised inside ``atomic``, it rolls the run's effects back.
    """
    changed = _end(claim, State.SUCCEEDED, result=result, error="", deaths=0)
    if not changed:
        request = claim.request
        raise StaleToken(
            f"attempt {claim.attempt} of key {request.key!r} in scope {request.scope!r} "
            "is not the latest any more",
            request.lock_name,
            request.lock_alias,
        )


def wait(claim: Claim, reason: str = "") -> bool:
    """Record the run as ended without an outcome: another delivery will go on.

    Returns:
        Whether it still was the latest; otherwise nothing was changed.
    """
    return _end(claim, State.WAITING, error=reason)


def fail(claim: Claim, error: str) -> bool:
    """Record the run as failed; a new delivery may take the key.

    Returns:
        Whether it still was the latest; otherwise nothing was changed.
    """
    return _end(claim, State.FAILED, error=error)


def has_succeeded(claim: Claim) -> bool:
    """Whether this very run is recorded as succeeded: the answer after a doubtful COMMIT.

    Waits for a COMMIT of which the server was told, and which it has not yet carried out.
    """
    if claim.record().filter(state=State.SUCCEEDED).exists():
        return True
    if not connections[claim.using].features.has_select_for_update:
        return False
    with transaction.atomic(using=claim.using):
        # By no condition that the COMMIT changes: the row would be passed over.
        found = claim.record().select_for_update().first()
        return found is not None and found.state == State.SUCCEEDED


def purge(
    *, before: dt.datetime | None = None, batch_size: int = 1000, using: str | None = None
) -> Iterator[int]:
    """Delete records whose retention has ended, in batches, each a transaction of its own.

    Args:
        before: Records that expired before this; the database's present time by default.

    Yields:
        How many records each batch deleted.
    """
    using = using or router.db_for_write(IdempotencyRecord)
    limit = Now() if before is None else before
    expired = _records(using).filter(expires_at__lt=limit)
    while batch := list(expired.order_by("expires_at").values_list("pk", flat=True)[:batch_size]):
        # Asked again in the deleting statement: a record may have been claimed meanwhile.
        yield expired.filter(pk__in=batch).delete()[0]


def _records(using: str) -> Records:
    records: Records = IdempotencyRecord.objects.using(using)
    return records


def _read(request: ClaimRequest, using: str, *, locking: bool) -> Any:
    expired = models.Case(
        models.When(expires_at__lte=Now(), then=True),
        default=False,
        output_field=models.BooleanField(),
    )
    found = IdempotencyRecord.objects.for_key(request.scope, request.key).using(using)
    if locking:
        found = found.select_for_update()
    return found.annotate(expired=expired).first()


def _facts(request: ClaimRequest) -> dict[str, Any]:
    return {
        "payload": request.payload,
        "state": State.RUNNING,
        "lock_alias": request.lock_alias,
        "lock_name": request.lock_name,
        "owner": request.owner,
        "token": request.token,
        "task_id": request.task_id,
        "result": "",
        "error": "",
        "started_at": Now(),
        "finished_at": None,
        "expires_at": Now() + request.ttl,
    }


def _insert(request: ClaimRequest, using: str) -> Claim | None:
    try:
        # A savepoint where there is a transaction already: the error must not spoil it.
        with transaction.atomic(using=using):
            record = _records(using).create(
                digest=IdempotencyRecord.digest_of(request.scope, request.key),
                scope=request.scope,
                key=request.key,
                attempt=1,
                created_at=Now(),
                **_facts(request),
            )
    except IntegrityError:
        return None
    return Claim(record.pk, 1, 0, request, using)


def _begin(
    record: IdempotencyRecord, request: ClaimRequest, using: str, *, deaths: int
) -> Claim | None:
    changed = _unchanged(record, using).update(
        attempt=record.attempt + 1, deaths=deaths, **_facts(request)
    )
    return Claim(record.pk, record.attempt + 1, deaths, request, using) if changed else None


def _give_up(record: IdempotencyRecord, request: ClaimRequest, using: str) -> None:
    """Record the key as failed and raise, unless somebody else wrote first."""
    deaths = record.deaths + 1
    error = AttemptsExhausted(
        f"{deaths} runs of key {request.key!r} in scope {request.scope!r} died in the middle",
        request.lock_name,
        request.lock_alias,
    )
    changed = _unchanged(record, using).update(
        # Counted on, so that the dead run cannot end if it is not as dead as believed.
        attempt=record.attempt + 1,
        state=State.FAILED,
        deaths=deaths,
        error=str(error),
        finished_at=Now(),
        expires_at=Now() + request.ttl,
    )
    if changed:
        raise error


def _unchanged(record: IdempotencyRecord, using: str) -> Records:
    return _records(using).filter(
        pk=record.pk, attempt=record.attempt, state=record.state, owner=record.owner
    )


def _end(claim: Claim, state: State, **facts: Any) -> bool:
    running = claim.record().filter(state=State.RUNNING)
    return bool(
        running.update(
            state=state, finished_at=Now(), expires_at=Now() + claim.request.ttl, **facts
        )
    )
