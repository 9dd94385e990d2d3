"""Runs a task with an idempotency record: claim the key, run the body, record the end."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    TimeLimitExceeded,
    WorkerShutdown,
    WorkerTerminate,
)
from django.db import Error, transaction

from ... import process
from ...databases import errors as database_errors
from ...exceptions import BackendUnavailable, RecordedFailure, StaleToken
from ...handler import locks
from ...log import logger
from ...records import idempotency
from ...records.idempotency import Claim, Ending, Finished, InFlight
from .. import results
from ..options import RecordOptions
from ..publishing import rerun
from ..publishing.follow_ups import FollowUps
from ..publishing.requeue import Requeue
from . import locking
from .context import DeliveryContext
from .interrupt import LeaseAborted
from .locking import Guard
from .recorded_outcome import (
    RunOutcome,
    UnknownAlias,
    claim_request,
    failure_of_copy,
    follow_ups_of,
    holds,
    log_copy,
    outcome_of_duplicate,
    requeue_unless_own,
)
from .repair import UsedConnection, in_transaction, repair

EXITS_BY_SIGNAL = range(1 - 256, signal.NSIG - 256)
"""What billiard's children exit with when a signal ends them. Other negative codes are the body's
own, such as that of ``sys.exit(-1)``."""


class _Stage(enum.Enum):
    """How far a run has come; an error is handled differently in each stage."""

    OPENING = enum.auto()
    BODY = enum.auto()
    RECORDING = enum.auto()
    COMMITTING = enum.auto()


class RecordedRun:
    """One delivery's run of one key.

    The claim, with its attempt number, is committed before the body begins. Only the latest
    attempt can complete the record; with ``atomic``, in one transaction with the body.

    Args:
        run_body: Runs the body of the task, which may record follow-ups.
    """

    def __init__(
        self,
        context: DeliveryContext,
        options: RecordOptions,
        guard: Guard,
        run_body: Callable[[Claim, FollowUps], Any],
    ) -> None:
        self.context, self.options, self.guard = context, options, guard
        self.run_body = run_body
        self.task, self.request = context.task, context.request
        self.before = in_transaction()
        self.stage = _Stage.OPENING
        self.value: Any = None
        self.ignore: Ignore | None = None
        self._used: UsedConnection | None = None
        # The owner of this run, if the database did not take its end.
        self._ended = ""

    def execute(self) -> RunOutcome:
        """Run, unless the work is already done.

        Raises:
            PayloadMismatch, DuplicateRun, AttemptsExhausted: The record refuses the run.
            RecordedFailure, Exception: See ``failure_of_copy``.
            DeliveryRefused, Requeue: See ``locking``.
            Exception: The body's own.
        """
        try:
            claim = self._claim()
        except BaseException as error:
            repair(error, self.before, interrupted=False)
            raise
        if isinstance(claim, Finished):
            return outcome_of_duplicate(self.context, self.options, claim, self.guard)
        if isinstance(claim, InFlight):
            locking.apply_if_contended(
                self.context,
                claim.lock_name,
                claim.lock_alias,
                now=self._backend_time(),
                copy=claim.task_id == self.request.id,
            )
        if claim.deaths:
            logger.warning(
                "Task %s[%s] repeats a run that died in the middle (attempt %d)",
                self.task.name,
                self.request.id,
                claim.attempt,
                **self._about,
            )
        if self.context.is_copy and claim.attempt > 1:
            self._end_at_reported_limit(claim)
        follow_ups = follow_ups_of(self.task, self.options, claim.record_id)
        try:
            self._run_and_record(claim, follow_ups)
        except BaseException as error:  # noqa: BLE001 - recorded, and raised again
            self._settle(claim, error)
        return RunOutcome(self.value, self.ignore, follow_ups)

    def _claim(self) -> Claim | Finished | InFlight:
        request = replace(
            claim_request(self.context, self.options, self.guard),
            worker=f"{self.request.hostname or process.current().host} · {os.getpid()}"[-255:],
            message=rerun.encode(self.task, self.request, self.context.args, self.context.kwargs),
        )
        try:
            return idempotency.claim(request, holds=holds, using=self.options.using)
        except RecordedFailure as failure:
            raise failure_of_copy(self.context, failure) from failure
        except BackendUnavailable as error:
            locking.apply_if_unavailable(self.context, error)
        except (UnknownAlias, Error) as error:
            requeue_unless_own(self.context, self.options, error)

    def _end_at_reported_limit(self, claim: Claim) -> None:
        """Fail if the worker has reported that an earlier delivery reached its hard time limit.

        A child that is killed at that limit cannot record that its run has failed.
        """
        error = results.stored_failure(self.task, self.request)
        if isinstance(error, TimeLimitExceeded):
            self._note(claim, idempotency.mark_failed, error, ours=True)
            log_copy(self.context, error)
            raise error

    def _backend_time(self) -> float | None:
        """The time on the clock of the lock's backend, computed from the held lease."""
        try:
            lease = locks[self.context.options.lock["using"]].get(self.guard.name)
        except BackendUnavailable:
            return None
        return None if lease is None else lease.acquired_at.timestamp() + lease.age

    # -- the run -----------------------------------------------------------------------

    def _run_and_record(self, claim: Claim, follow_ups: FollowUps) -> None:
        if not self.task.atomic:
            self._used = UsedConnection(claim.using)
            self._note_body(claim, follow_ups)
            with transaction.atomic(claim.using) if follow_ups.replaced else nullcontext():
                self._record(claim, follow_ups)
            return
        with transaction.atomic(using=claim.using):
            self._used = UsedConnection(claim.using)
            self._note_body(claim, follow_ups)
            self._record(claim, follow_ups)

    def _note_body(self, claim: Claim, follow_ups: FollowUps) -> None:
        """Run the body, and keep what it returned or raised as ``Ignore``."""
        self.stage = _Stage.BODY
        try:
            self.value = self.run_body(claim, follow_ups)
        except Ignore as ignore:
            # ``replace()`` raises it, too. ``LeaseAborted`` is also an ``Ignore``, but the run
            # failed: it was stopped for its own lease, or for that of a task that calls it
            # eagerly.
            if isinstance(ignore, LeaseAborted) or self.context.loss_behind(ignore) is not None:
                raise
            self.ignore = ignore
        except Error:
            if self._used is not None:
                self._used.note_error()
            raise
        self.stage = _Stage.RECORDING

    def _record(self, claim: Claim, follow_ups: FollowUps) -> None:
        result, ending = "", Ending.RETURNED
        if self.ignore is not None:
            ending = Ending.REPLACED if follow_ups.replaced else Ending.IGNORED
        elif self.task.store_result:
            result = results.encode(self.value, task=self.task.name, task_id=self.request.id)
        follow_ups.close()
        idempotency.complete(claim, result, ending)
        self.stage = _Stage.COMMITTING

    # -- how it ended ------------------------------------------------------------------

    def _settle(self, claim: Claim, error: BaseException) -> None:
        """Record the end of a run that raised; returns only if the run succeeded nevertheless.

        Raises:
            Requeue: The message is to be requeued.
            BaseException: ``error``, if that is the outcome.
        """
        if self._used is not None and isinstance(error, Error):
            self._used.look()
        repair(error, self.before, interrupted=self.context.body_runner.interrupted)
        if self.stage in (_Stage.RECORDING, _Stage.COMMITTING):
            self._read_back(claim, error)
            if self.stage is _Stage.COMMITTING:
                return
        if isinstance(error, StaleToken) and self.stage is _Stage.RECORDING:
            # Another run has the key now. Requeue, so that this message gets its outcome later.
            raise self._requeue(error) from error
        loss = self.context.loss_behind(error) if self.stage is _Stage.BODY else None
        if loss is None and isinstance(error, Error) and self._is_of_the_database(error):
            # Count a death here, too: the body may have lost its connection, or have idled for
            # too long, and may do so again. In an outage, this cannot be recorded either.
            died = self._used is not None and (self._used.is_lost or database_errors.counts(error))
            mark = idempotency.mark_interrupted if died else idempotency.mark_waiting
            self._note(claim, mark, error)
            raise self._requeue(database_errors.explained(error, claim.using)) from error
        reason = loss or self.context.interruption(error)
        if reason is not None:
            # Count it as a run that died, because the body may be the cause and may do so again;
            # unless the lock's backend was unreachable.
            away = locking.was_outage(reason)
            mark = idempotency.mark_waiting if away else idempotency.mark_interrupted
            self._note(claim, mark, reason, ours=reason is not error)
            raise self._requeue(reason) from error
        if not isinstance(error, Exception) and self._ends_its_process(error):
            # Without a limit, Celery would redeliver it for ever. The record is left as it is,
            # so that the run counts as one that died in the middle.
            raise error
        if isinstance(error, Retry | Reject) or not isinstance(error, Exception):
            self._note(claim, idempotency.mark_waiting, error)
            raise error
        outage = self._note(claim, idempotency.mark_failed, error)
        if outage is not None and database_errors.ours_may_succeed(outage):
            # The body probably failed in the same outage, and its end could not be recorded.
            raise self._requeue(database_errors.explained(outage, claim.using)) from error
        raise error

    def _requeue(self, reason: Exception) -> Requeue:
        header = self.context.header.after_setback()
        return Requeue(reason, replace(header, ended=self._ended))

    def _ends_its_process(self, error: BaseException) -> bool:
        """Whether the body ends the process, for example by ``sys.exit()``, and not a shutdown."""
        if self.context.eager or isinstance(error, WorkerShutdown | WorkerTerminate):
            return False
        if not isinstance(error, SystemExit):
            # A pool's children ignore SIGINT.
            return isinstance(error, KeyboardInterrupt)
        return not (isinstance(error.code, int) and error.code in EXITS_BY_SIGNAL)

    def _is_of_the_database(self, error: Error) -> bool:
        """Whether the run ended because of the record's database, and not of its own statements."""
        used = self._used
        if self.stage is _Stage.BODY and used is not None:
            return used.failed_with(error) or database_errors.is_about_our_tables(error)
        # The statement was ours.
        return database_errors.ours_may_succeed(error) or (used is not None and used.broke(error))

    def _read_back(self, claim: Claim, error: BaseException) -> None:
        """Find out whether a COMMIT without an answer succeeded; sets the stage."""
        try:
            succeeded = idempotency.has_succeeded(claim)
        except Error as trouble:
            self._ended = claim.request.owner
            raise self._requeue(trouble) from error
        self.stage = _Stage.COMMITTING if succeeded else _Stage.RECORDING
        if not succeeded:
            return
        if not isinstance(error, Exception) and self.context.interruption(error) is None:
            raise error
        logger.error(
            "Task %s[%s] is recorded as succeeded, but an error was raised after its COMMIT: %s",
            self.task.name,
            self.request.id,
            self.context.describe(error),
            # A traceback ends with the text of the error.
            exc_info=None if self.context.is_private else error,
            **self._about,
        )

    def _note(
        self,
        claim: Claim,
        end: Callable[[Claim, str], bool],
        reason: BaseException,
        *,
        ours: bool = False,
    ) -> Error | None:
        """Record the end of the run; returns the error if that fails.

        Then the key can be claimed again as soon as its owner no longer holds the lock.

        Args:
            ours: Whether the text of the reason is ours, and quotes no arguments.
        """
        text = results.describe(reason) if ours else self.context.describe(reason)
        try:
            end(claim, text)
        except Error as error:
            logger.warning(
                "Task %s[%s]: the end of the run was not recorded: %s",
                self.task.name,
                self.request.id,
                error,
                **self._about,
            )
            self._ended = claim.request.owner
            return error
        return None

    @property
    def _about(self) -> dict[str, Any]:
        """What log lines carry."""
        return {"about": self.guard, "task_id": self.request.id}
