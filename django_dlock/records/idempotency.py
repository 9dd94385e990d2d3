"""The idempotency record: claim, complete, wait, interrupt, fail.

Whether a run counts is decided in the record's database, by the record's attempt number; never by
the state of a lease, a queue or a result backend. Every write is one conditional statement that
names its attempt, so no write needs a lock::

    run A   claim → attempt 1 … stopped ……………………………… complete(attempt 1): 0 rows → StaleToken
    run B                       lease gone, claim → attempt 2 … complete(attempt 2): 1 row

Times are those of the database (``Now()``). This module knows neither tasks nor views; results are
text that the caller has encoded.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

from django.db import Error, IntegrityError, connections, models, router, transaction

from ..core import tracing
from ..databases import errors as database_errors
from ..databases.time import Now
from ..exceptions import (
    AttemptsExhausted,
    DuplicateRun,
    LockError,
    PayloadMismatch,
    RecordedFailure,
    StaleToken,
)
from ..models import IdempotencyRecord
from . import payloads
from .claims import Claim, ClaimRequest, Finished, Holds, InFlight

__all__ = [
    "Claim",
    "ClaimRequest",
    "Finished",
    "InFlight",
    "claim",
    "complete",
    "find_outcome",
    "has_succeeded",
    "mark_failed",
    "mark_interrupted",
    "mark_waiting",
    "replace_result",
]

State: TypeAlias = IdempotencyRecord.State
Ending: TypeAlias = IdempotencyRecord.Ending

_RACES = 100
"""A claim gives up after this many other writers were faster; each of them made progress."""


def claim(
    request: ClaimRequest, *, holds: Holds, using: str | None = None
) -> Claim | Finished | InFlight:
    """Begin a run of a key, unless its work is done or in progress.

    Works inside and outside ``transaction.atomic()``. Outside, the claim is committed before
    this returns, so that a run that dies is counted. An expired record counts as absent.

    Raises:
        PayloadMismatch: The key was used with another payload, by another task id.
        DuplicateRun: Another task did part of the work and replaced itself, and the replacement
            failed.
        RecordedFailure: The run of this task id has failed for good, and this is a copy of it.
        AttemptsExhausted: ``max_attempts`` runs died in the middle; the record is now failed. With
            ``stays_exhausted``, also for every later claim, until the record expires.
        BackendUnavailable: A run is recorded, and the backend does not say whether its owner
            still holds the lock.
    """
    using = using or router.db_for_write(IdempotencyRecord)
    with tracing.step("django_dlock.claim", scope=request.scope, key=request.key) as outcome:
        answer = _claim(request, holds, using)
        outcome({Claim: "claimed", Finished: "finished", InFlight: "in flight"}[type(answer)])
    return answer


def _claim(request: ClaimRequest, holds: Holds, using: str) -> Claim | Finished | InFlight:
    for race in range(_RACES):
        # The caller's transaction may see only what was there when it began. A locking read sees
        # the present on MySQL, and raises on PostgreSQL.
        locking = race > 0 and connections[using].in_atomic_block
        record = _read(request, using, locking=locking)
        if record is None:
            claimed = _insert(request, using)
        elif record.expired and record.state != State.RUNNING:
            claimed = _begin(record, request, using, deaths=0)
        elif answer := _answer(record, request):
            return answer
        elif record.state != State.RUNNING:
            deaths = record.deaths if record.state == State.WAITING else 0
            claimed = _begin(record, request, using, deaths=deaths)
        elif holds(record.lock_alias, record.lock_name, record.owner):
            return _in_flight(record)
        elif request.ended and record.owner == request.ended:
            claimed = _begin(record, request, using, deaths=record.deaths)
        elif record.deaths + 1 >= request.max_attempts:
            _give_up(record, request)
            continue
        else:
            claimed = _begin(record, request, using, deaths=record.deaths + 1)
        if claimed is not None:
            return claimed
        # Another writer was faster; read the record again.
    raise request.error(LockError, f"changed {_RACES} times during one claim")


def find_outcome(request: ClaimRequest, *, using: str | None = None) -> Finished | InFlight | None:
    """What is recorded for a key, without a claim; ``None`` if a run may begin.

    A run that is recorded as running may have died: its backend is not asked.

    Raises:
        PayloadMismatch, DuplicateRun, RecordedFailure: As ``claim``.
    """
    using = using or router.db_for_write(IdempotencyRecord)
    record: Any = _read(request, using, locking=False)
    if record is None or (record.expired and record.state != State.RUNNING):
        return None
    answer = _answer(record, request)
    if answer is None and record.state == State.RUNNING:
        return _in_flight(record)
    return answer


def complete(claim: Claim, result: str = "", ending: str = Ending.RETURNED) -> None:
    """Record the run as succeeded; call it in the transaction of its effects, if there is one.

    Args:
        ending: ``Ending.REPLACED`` lets the next step of the same task id run.

    Raises:
        StaleToken: A later attempt was claimed, or the record was forgotten, so this run does
            not count. Inside ``atomic``, this error rolls back the run's effects.
    """
    request = claim.request
    with tracing.step(
        "django_dlock.complete", scope=request.scope, key=request.key, attempt=claim.attempt
    ):
        if _end(claim, State.SUCCEEDED, result=result, ending=ending, error="", deaths=0):
            return
        raise request.error(StaleToken, f"has a later attempt than {claim.attempt}, or none")


def replace_result(claim: Claim, former: str, result: str) -> bool:
    """Replace the result of a run that has succeeded, unless something else was written since."""
    succeeded = claim.record().filter(state=State.SUCCEEDED, result=former)
    return bool(succeeded.update(result=result))


def mark_waiting(claim: Claim, reason: str = "") -> bool:
    """Record that the run ended without an outcome and that another delivery will follow.

    Returns:
        Whether it was still the latest; otherwise nothing has changed.
    """
    return _end(claim, State.WAITING, error=reason)


def mark_interrupted(claim: Claim, reason: str) -> bool:
    """Record that the run died in the middle, while its process is still alive.

    Returns:
        Whether it was still the latest; otherwise nothing has changed.

    Raises:
        AttemptsExhausted: ``max_attempts`` runs died in the middle; the record is now failed.
    """
    deaths = claim.deaths + 1
    if deaths < claim.request.max_attempts:
        return _end(claim, State.WAITING, error=reason, deaths=deaths)
    error = _exhausted(claim.request, deaths, reason)
    if _end(claim, State.FAILED, error=str(error), deaths=deaths):
        raise error
    return False


def mark_failed(claim: Claim, error: str) -> bool:
    """Record the run as failed; only a copy of its message may not claim the key.

    Returns:
        Whether it was still the latest; otherwise nothing has changed.
    """
    return _end(claim, State.FAILED, error=error)


def has_succeeded(claim: Claim) -> bool:
    """Whether this very run is recorded as succeeded; for a COMMIT that was not answered.

    Waits for a COMMIT that the server has received and not yet completed.
    """
    if claim.record().filter(state=State.SUCCEEDED).exists():
        return True
    if not connections[claim.using].features.has_select_for_update:
        return False
    with transaction.atomic(using=claim.using):
        # Without a condition on the state, which that COMMIT changes: it would skip the row.
        found = claim.record().select_for_update().first()
        return found is not None and found.state == State.SUCCEEDED


def _read(request: ClaimRequest, using: str, *, locking: bool) -> Any:
    expired = models.Case(
        models.When(expires_at__lte=Now(), then=True),
        default=False,
        output_field=models.BooleanField(),
    )
    digest = IdempotencyRecord.digest_of(request.scope, request.key)
    found = IdempotencyRecord.objects.using(using).filter(digest=digest)
    if locking:
        found = found.select_for_update()
    return found.annotate(expired=expired).defer("message").first()


_OF_THE_RUN = (
    *("lock_alias", "lock_name", "owner", "token"),
    *("task_id", "step", "worker", "message"),
)


def _facts(request: ClaimRequest) -> dict[str, Any]:
    return {
        **{fact: getattr(request, fact) for fact in _OF_THE_RUN},
        "payload": payloads.keyed(request.scope, request.key, request.payload),
        "state": State.RUNNING,
        "ending": "",
        "result": "",
        "error": "",
        "started_at": Now(),
        "finished_at": None,
        "expires_at": Now() + request.ttl,
    }


def _insert(request: ClaimRequest, using: str) -> Claim | None:
    try:
        # In a caller's transaction this is a savepoint, so that the error does not break it.
        with transaction.atomic(using=using):
            record = IdempotencyRecord.objects.using(using).create(
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


def _answer(record: Any, request: ClaimRequest) -> Finished | InFlight | None:
    """What prevents a run from beginning, apart from a run that is recorded as running.

    Only a run that was replaced is followed by a run of the next step::

        run, step 0    replace() … succeeded, "replaced"
        redelivery, step 0                 step 0 is done: Finished("replaced")
        replacement, step 1                claim … succeeded, "returned"
        another task id                    Finished | InFlight while step 1 runs | Finished

    Raises:
        PayloadMismatch, DuplicateRun, RecordedFailure: See ``claim``.
    """
    finished = Finished(record.result, record.task_id, record.ending, record.pk)
    if request.task_id and record.task_id == request.task_id:
        if request.step < record.step:
            return Finished("", record.task_id, Ending.REPLACED, record.pk)
        if record.state == State.SUCCEEDED:
            goes_on = request.step > record.step and record.ending == Ending.REPLACED
            return None if goes_on else finished
        if record.state == State.FAILED and request.is_copy and request.step == record.step:
            raise request.error(RecordedFailure, f"failed for good: {record.error}")
        # A replacement that arrived before the replaced run was recorded.
        return _in_flight(record) if request.step > record.step else None
    same = payloads.is_same(record.payload, request.scope, request.key, request.payload)
    if not same and not record.expired:
        raise request.error(PayloadMismatch, "was used with another payload")
    if record.state == State.SUCCEEDED:
        return finished
    exhausted = record.state == State.FAILED and record.deaths >= request.max_attempts
    if exhausted and request.stays_exhausted:
        raise _exhausted(request, record.deaths, "")
    if record.ending != Ending.REPLACED:
        return None
    if record.state == State.FAILED:
        raise request.error(
            DuplicateRun,
            f"is partly done: task {record.task_id} replaced itself and then failed; forget the "
            "record to start again",
        )
    return _in_flight(record)


def _in_flight(record: IdempotencyRecord) -> InFlight:
    return InFlight(record.lock_alias, record.lock_name, record.owner, record.task_id)


def _begin(record: Any, request: ClaimRequest, using: str, *, deaths: int) -> Claim | None:
    facts = _facts(request)
    if record.ending == Ending.REPLACED and not record.expired:
        # Keep the payload and the message of the first run, and the mark that the task has
        # replaced itself.
        facts.update(ending=record.ending, payload=record.payload)
        del facts["message"]
    changed = record.as_it_was().update(attempt=record.attempt + 1, deaths=deaths, **facts)
    return Claim(record.pk, record.attempt + 1, deaths, request, using) if changed else None


def _give_up(record: IdempotencyRecord, request: ClaimRequest) -> None:
    """Record the key as failed and raise, unless another writer was faster."""
    deaths = record.deaths + 1
    error = _exhausted(request, deaths, record.error)
    changed = record.as_it_was().update(
        # Incremented, so that the run cannot end its record if it is still alive after all.
        attempt=record.attempt + 1,
        state=State.FAILED,
        deaths=deaths,
        error=str(error),
        finished_at=Now(),
        expires_at=Now() + request.ttl,
    )
    if changed:
        raise error


def _exhausted(request: ClaimRequest, deaths: int, reason: str) -> AttemptsExhausted:
    because = f"; the last one: {reason}" if reason else ""
    if request.stays_exhausted:
        because += "; forget the record to let it run again"
    return request.error(AttemptsExhausted, f"had {deaths} runs that died in the middle{because}")


def _end(claim: Claim, state: State, **facts: Any) -> bool:
    running = claim.record().filter(state=State.RUNNING)
    facts = {**facts, "state": state, "finished_at": Now()}

    def write() -> bool:
        return bool(running.update(**facts, expires_at=Now() + claim.request.ttl))

    try:
        return write()
    except Error as error:
        connection = connections[claim.using]
        if connection.in_atomic_block or database_errors.kind_of(error) != "broken":
            raise
        # Outside a transaction, only this statement is lost with the connection, which may have
        # been idle for as long as the run took.
        with contextlib.suppress(Error):
            connection.close()
    # The first one may have been executed, and only its answer been lost.
    return write() or claim.record().filter(state=state).exists()
