"""A run with an idempotency record: claimed, run, recorded, or taken back."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from django.db import Error, connections, transaction

from .. import idempotency
from ..exceptions import BackendUnavailable, DuplicateRun, StaleToken
from ..handler import locks
from ..idempotency import Claim, ClaimRequest, Finished, InFlight
from . import contention, database, results
from .abort import LeaseAborted
from .contention import Hold, Skipped
from .options import RecordOptions
from .requeue import PutBack

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = ["RecordedRun"]

logger = logging.getLogger("django_dlock")


class _Stage(enum.Enum):
    """How far a run has come; an error means another thing in each."""

    OPENING = enum.auto()
    BODY = enum.auto()
    RECORDING = enum.auto()
    COMMITTING = enum.auto()


class RecordedRun:
    """One delivery's run of one key.

    Whether it counts is decided by its attempt alone. Its claim is committed before the body
    begins; with ``atomic`` the body and the record's completion are one transaction after it.
    """

    def __init__(self, delivery: Delivery, options: RecordOptions, hold: Hold) -> None:
        self.delivery, self.options, self.hold = delivery, options, hold
        self.task, self.request = delivery.task, delivery.request
        self.before = database.in_transaction()
        self.stage = _Stage.OPENING
        self.value: Any = None
        self.ignore: Ignore | None = None
        self._connection: Any = None

    def work_off(self) -> Any:
        """The body's result, or the recorded one.

        Raises:
            PayloadMismatch, DuplicateRun, AttemptsExhausted: The record refuses the run.
            Skipped, PutBack: See ``contention``.
            Exception: The body's own.
        """
        try:
            claim = self._claim()
        except BaseException as error:
            database.mend(error, self.before, struck=False)
            raise
        if isinstance(claim, Finished):
            return self._duplicate(claim)
        if isinstance(claim, InFlight):
            contention.contended(self.delivery, claim.lock_name, claim.lock_alias, None)
        if claim.deaths:
            logger.warning(
                "Task %s[%s] takes over a run that died in the middle (attempt %d)",
                self.task.name,
                self.request.id,
                claim.attempt,
            )
        run = self.delivery.run
        run.scope, run.key = claim.request.scope, claim.request.key
        run.attempt = claim.attempt
        try:
            self._run(claim)
        except BaseException as error:  # noqa: BLE001 - settled, and raised again
            self._settle(claim, error)
        if self.ignore is not None:
            raise self.ignore
        return self.value

    def _claim(self) -> Claim | Finished | InFlight:
        args, kwargs = self.delivery.args, self.delivery.kwargs
        request = ClaimRequest(
            scope=self.options.scope,
            key=self.options.key(args, kwargs),
            payload=self.options.payload(args, kwargs),
            ttl=self.options.ttl,
            lock_alias=self.hold.alias,
            lock_name=self.hold.name,
            owner=self.hold.owner or "",
            token=self.hold.token,
            task_id=self.request.id or "",
            max_attempts=self.delivery.options.max_attempts,
        )
        try:
            return idempotency.claim(request, holds=_holds, using=self.options.using)
        except BackendUnavailable as error:
            contention.unavailable(self.delivery, error)
        except database.OUTAGES as error:
            raise PutBack(error, self.delivery.trail) from error

    def _duplicate(self, finished: Finished) -> Any:
        logger.info(
            "Task %s[%s] is a duplicate of a run that succeeded", self.task.name, self.request.id
        )
        if finished.task_id == self.request.id:
            # This very task, delivered again: whoever waits for it may not have its result yet.
            if self.options.store_result and not finished.result:
                # Nor shall it: a replacement has the same id and gives the result.
                raise Ignore("It was worked off already, and ended with Ignore")
            return results.decode(finished.result)
        if self.options.if_duplicate == "skip":
            raise Skipped
        if self.options.if_duplicate == "fail":
            raise DuplicateRun("It was worked off already", self.hold.name, self.hold.alias)
        return results.decode(finished.result)

    # -- the run -----------------------------------------------------------------------

    def _run(self, claim: Claim) -> None:
        if not self.options.atomic:
            self._body_and_record(claim)
            return
        with transaction.atomic(using=claim.using):
            self._connection = connections[claim.using].connection
            self._body_and_record(claim)

    def _body_and_record(self, claim: Claim) -> None:
        self.stage = _Stage.BODY
        try:
            self.value = self.delivery.body()
        except Ignore as ignore:
            # ``replace()`` too. A run that was stopped is an ``Ignore`` as well, but no success;
            # nor is one that was stopped for a task in whose body it runs eagerly.
            if isinstance(ignore, LeaseAborted) or self.delivery.loss_behind(ignore) is not None:
                raise
            self.ignore = ignore
        self.stage = _Stage.RECORDING
        result = ""
        # None at all for ``Ignore``, by which it is known again.
        if self.options.store_result and self.ignore is None:
            result = results.encode(self.value, task=self.task.name)
        idempotency.complete(claim, result)
        self.stage = _Stage.COMMITTING

    # -- how it ended ------------------------------------------------------------------

    def _settle(self, claim: Claim, error: BaseException) -> None:
        """Record how a run ended that raised; returns only where it succeeded all the same.

        Raises:
            PutBack: The delivery is to come again.
            BaseException: ``error``, where that is the outcome.
        """
        cut = self._cut(claim, error)
        database.mend(error, self.before, struck=self.delivery.struck)
        if self.stage in (_Stage.RECORDING, _Stage.COMMITTING):
            self._read_back(claim, error)
            if self.stage is _Stage.COMMITTING:
                return
        if isinstance(error, StaleToken) and self.stage is _Stage.RECORDING:
            # Another run has the key now. This message comes again to learn what became of it.
            raise PutBack(error, self.delivery.trail) from error
        if isinstance(error, database.OUTAGES) and self.stage is not _Stage.BODY:
            self._note(claim, idempotency.wait, error)
            raise PutBack(error, self.delivery.trail) from error
        loss = self.delivery.loss_behind(error) if self.stage is _Stage.BODY else None
        if loss is not None:
            # A run that outlasts ``max_hold`` would do so for ever: left as it is, it counts
            # as one that died in the middle.
            if loss.reason != "max_hold":
                self._note(claim, idempotency.wait, loss)
            raise PutBack(loss, self.delivery.trail) from error
        if cut is not None:
            # It may be the body that breaks the connection: left as it is, the run counts as
            # one that died in the middle.
            raise PutBack(cut, self.delivery.trail) from error
        if not isinstance(error, Exception) and self._ends_its_process(error):
            # It would do so for ever, and Celery deliver it again each time: left as it is, it
            # counts as one that died in the middle.
            raise error
        if isinstance(error, Retry | Reject) or not isinstance(error, Exception):
            self._note(claim, idempotency.wait, error)
            raise error
        outage = self._note(claim, idempotency.fail, error)
        if isinstance(outage, database.OUTAGES):
            # The body probably failed of the same outage, and no outcome is on record.
            raise PutBack(outage, self.delivery.trail) from error
        raise error

    def _ends_its_process(self, error: BaseException) -> bool:
        """Whether the body did, by ``sys.exit()``, and not a worker that stops."""
        if self.delivery.eager or isinstance(error, WorkerShutdown | WorkerTerminate):
            return False
        if not isinstance(error, SystemExit):
            # A pool's children ignore SIGINT.
            return isinstance(error, KeyboardInterrupt)
        # As such a child ends at SIGTERM.
        by_signal = isinstance(error.code, int) and error.code < 0
        return not by_signal

    def _cut(self, claim: Claim, error: BaseException) -> Error | None:
        """The error, if the body failed as the connection of its transaction was gone."""
        if self.stage is not _Stage.BODY or not self.options.atomic:
            return None
        # Leaving ``atomic``, Django replaces a connection that it cannot roll back.
        same = connections[claim.using].connection is self._connection
        return error if isinstance(error, database.OUTAGES) and not same else None

    def _read_back(self, claim: Claim, error: BaseException) -> None:
        """Find out what a doubtful COMMIT did; the stage says so afterwards."""
        try:
            succeeded = idempotency.has_succeeded(claim)
        except Error as trouble:
            raise PutBack(trouble, self.delivery.trail) from error
        self.stage = _Stage.COMMITTING if succeeded else _Stage.RECORDING
        if not succeeded:
            return
        if not isinstance(error, Exception):
            raise error
        logger.error(
            "Task %s[%s] is recorded as succeeded; after its COMMIT this was raised",
            self.task.name,
            self.request.id,
            exc_info=error,
        )

    def _note(
        self, claim: Claim, end: Callable[[Claim, str], bool], reason: BaseException
    ) -> Error | None:
        """Write down the end of the run; where that fails, the error, and the key is taken
        over once its owner holds no more."""
        try:
            end(claim, results.describe(reason))
        except Error as error:
            logger.warning(
                "Task %s[%s]: the end of its run was not recorded: %s",
                self.task.name,
                self.request.id,
                error,
            )
            return error
        return None


def _holds(alias: str, name: str, owner: str) -> bool:
    """Whether the backend says that ``owner`` holds the name now."""
    lease = locks[alias].get(name)
    # A parked lease has an owner of its own: its run has ended, and the record waits.
    return lease is not None and lease.owner == owner and lease.kind == "held"
