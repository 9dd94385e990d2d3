"""Runs one delivery of a task: lock, body, record, and whether the message is requeued."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded, TimeLimitExceeded
from django.db import Error

from ...core.unfinished import refuse_unfinished
from ...databases import errors as database_errors
from ...exceptions import AttemptsExhausted, BackendUnavailable, LeaseLost, NotHeld
from ...lock import Lock
from ...log import logger
from ...records.idempotency import Claim
from ..binding import call_before_start
from ..canvas import chords
from ..options import TaskWithOptions
from ..publishing.follow_ups import FollowUps, Unpublished
from ..publishing.header import RequeueHeader
from ..publishing.requeue import Requeue, requeue
from ..publishing.reservation import MessageReservation, Reservation
from . import locking, parked_lock, recorded_outcome
from .context import RUN, DeliveryContext
from .locking import DeliveryRefused, Guard
from .recorded_outcome import RunOutcome
from .recorded_run import RecordedRun
from .repair import in_transaction, repair

_UNCHANGEABLE = frozenset({bool, bytes, float, int, str, type(None)})


class Delivery:
    """Acquire, run, record, release, and report to Celery by returning or raising.

    The lock is always released before the message is requeued, because the next delivery needs it.
    """

    def __init__(self, context: DeliveryContext) -> None:
        self.context = context
        self.guard: Guard | None = None
        reservation = None
        if not context.eager:
            mark = context.header.reserved
            reservation = Reservation.read(context.task, mark, context.request.id)
        self.reservation = MessageReservation(reservation, acks_late=bool(context.task.acks_late))
        self._message: Callable[[], tuple[Any, Any]] = lambda: (context.args, context.kwargs)

    def execute(self) -> Any:
        """Return the body's result, or the recorded one.

        Raises:
            Ignore, Reject: The message was requeued or returned.
            Exception: The body's own, or the reason why it did not run.
        """
        # From the outside to the inside, each calls the next one, and ends after it:
        #   execute                 frees the key of ``unique_until`` when the task is over
        #   _run_or_requeue         publishes the message again
        #   _run_and_follow_up      publishes the follow-ups, when the lock is free
        #   _run_or_find_finished   without the lock, looks for a recorded result
        #   _acquire_and_run        takes the lock, and releases or parks it
        #   _run_holding            runs the body, with the record if there is one
        with self.reservation:
            return self._run_or_requeue()

    def _run_or_requeue(self) -> Any:
        context = self.context
        try:
            return self._run_and_follow_up()
        except Requeue as cause:
            if context.eager:
                # There is no message to requeue.
                raise cause.reason from cause
            cause.not_acquired = context.not_acquired
            requeue(context.task, context.request, self._message(), cause, context.began)

    def _run_and_follow_up(self) -> Any:
        try:
            value = self._run_or_find_finished()
        except Ignore:
            # Raised by ``replace()``, whose replacement is a follow-up.
            self._publish_follow_ups()
            raise
        self._publish_follow_ups()
        return value

    def _publish_follow_ups(self) -> None:
        """Publish what the run recorded. The lock is free by now: a follow-up may need it."""
        follow_ups = self.context.run.follow_ups
        try:
            if follow_ups is not None:
                follow_ups.publish()
        except (Unpublished, Error, SoftTimeLimitExceeded) as error:
            reason: Exception = error
            header = self.context.header.after_setback()
            if isinstance(error, Error) and follow_ups is not None:
                reason = database_errors.explained(error, follow_ups.using)
                passes = database_errors.ours_may_succeed(error)
                if not passes and header.setbacks >= self.context.task.max_attempts:
                    self._leave_pending(error, follow_ups.using)
                    return
            # The work stays done. The next delivery of the message publishes the rest.
            raise Requeue(reason, header) from error

    def _leave_pending(self, error: Error, using: str) -> None:
        """Log that follow-ups are left to the command; the work is done, so it must not fail."""
        logger.error(
            "Task %s[%s]: its outbox messages are not published: %s. They are pending; run "
            "manage.py publish_pending_followups --database %s",
            *self._named,
            error,
            using,
            task_id=self._named[1],
        )

    def _run_or_find_finished(self) -> Any:
        """Run; or if the delivery is refused, return the result of a recorded run."""
        try:
            return self._acquire_and_run()
        except DeliveryRefused as refused:
            record = self.context.options.record
            if record is not None:
                finished = recorded_outcome.find_finished(self.context, record)
                if finished is not None:
                    return self._end_as(
                        recorded_outcome.outcome_of_duplicate(self.context, record, finished)
                    )
            if refused.answer is None:
                return None
            raise refused.answer from refused

    def _acquire_and_run(self) -> Any:
        try:
            self._await_chord()
            # Stored before it is acquired: a soft time limit may be raised right after that.
            self.guard = locking.lock_of(self.context)
            self.guard = locking.acquire(self.context, self.guard)
            return self._run_holding(self.guard)
        except Retry as retry:
            if parked_lock.park(self.context, self.guard, retry):
                self.guard = None
            raise
        finally:
            if self.guard is not None:
                self._release(self.guard)

    def _await_chord(self) -> None:
        """Requeue the message while the body of its chord is being sent.

        Raises:
            Requeue: The body is being sent, or the result backend does not answer.
        """
        reason = chords.obstacle(self.context.task, self.context.request)
        if reason is None:
            return
        header = self.context.header
        if isinstance(reason, chords.ChordClaimed):
            # A claim lasts a few seconds, so it is checked again every second or two.
            header = replace(header, count=min(header.count, 2))
        raise Requeue(reason, header) from reason

    def _run_holding(self, guard: Guard) -> Any:
        context = self.context
        context.run.lock = guard if isinstance(guard, Lock) else None
        self._release_reservation()
        record = context.options.record
        if record is not None:
            return self._end_as(
                RecordedRun(context, record, guard, self._run_recorded_body).execute()
            )
        before = in_transaction()
        try:
            return self._call_body()
        except BaseException as error:
            repair(error, before, interrupted=context.body_runner.interrupted)
            reason = context.loss_behind(error) or context.interruption(error)
            if reason is None:
                raise
            raise Requeue(reason, self._header_after(reason)) from error

    def _release_reservation(self) -> None:
        """With ``unique_until="start"``, let other tasks of the key be published from now on.

        The body must see everything that was written before a duplicate was dropped. So it does
        not begin until the release is confirmed.

        Raises:
            Requeue, DeliveryRefused: No answer; see ``locking.apply_if_unavailable``.
        """
        context = self.context
        try:
            released = self.reservation.release_before_body(context.options.unique)
        except BackendUnavailable as error:
            locking.apply_if_unavailable(context, error)
        if released:
            context.header = replace(context.header, reserved="")

    def _run_recorded_body(self, claim: Claim, follow_ups: FollowUps) -> Any:
        """Run the body of a claimed key; the body can read the claim in ``current_run``."""
        run = self.context.run
        run.scope, run.key = claim.request.scope, claim.request.key
        run.attempt, run.follow_ups = claim.attempt, follow_ups
        return self._call_body()

    def _call_body(self) -> Any:
        """Run the body until it ends or, with ``if_lost="abort"``, until its lease ends."""
        context = self.context
        self._message = _remember(context.args, context.kwargs)
        # Contention is over once the body runs, so a retry must not inherit when it began.
        context.header = parked_lock.header_of_body(context, self.guard)
        context.header.write(context.request)
        try:
            return context.body_runner.run(self._run_body)
        except Exception as error:
            loss = context.loss_behind(error)
            if loss is None or not self._is_at_time_limit(loss):
                raise
            # Some pools do not kill a task at its time limit; there the end of the lease stops
            # it. Fail it as a killed task fails: if it were requeued, it would overrun again.
            raise TimeLimitExceeded(context.time_limit) from error

    def _run_body(self) -> Any:
        context = self.context
        task, args, kwargs = context.task, context.args, context.kwargs
        known = vars(context.request)
        known[RUN] = context.run
        try:
            call_before_start(task, args, kwargs)
            return _ended(task, task.run(*args, **kwargs))
        finally:
            known.pop(RUN, None)

    def _is_at_time_limit(self, loss: LeaseLost) -> bool:
        """Whether the lease ended at the task's time limit, and not at a ``lock_max_hold``."""
        limit_set = "max_hold" in self.context.options.lock
        return loss.reason == "max_hold" and not limit_set and bool(self.context.time_limit)

    def _end_as(self, outcome: RunOutcome) -> Any:
        """The value of a recorded run.

        Raises:
            Ignore: The run ended with it.
        """
        if outcome.follow_ups is not None:
            self.context.run.follow_ups = outcome.follow_ups
        if outcome.ignored is not None:
            raise outcome.ignored
        return outcome.value

    def _header_after(self, reason: Exception) -> RequeueHeader:
        """The header of a task without a record whose run had no outcome.

        Raises:
            AttemptsExhausted: ``max_attempts`` runs were interrupted, or lost their lease.
        """
        if locking.was_outage(reason):
            return self.context.header.after_setback()
        header = self.context.header.after_setback(losses=1)
        if header.losses >= self.context.task.max_attempts:
            raise AttemptsExhausted(
                f"{header.losses} runs did not end; the last one: {reason}",
                *((reason.name, reason.alias) if isinstance(reason, LeaseLost) else ()),
            )
        return header

    def _release(self, guard: Guard) -> None:
        try:
            guard.release()
        except (LeaseLost, NotHeld) as error:
            # The loss was signalled when it happened, and the run is over.
            logger.debug("Task %s[%s]: %s", *self._named, error, task_id=self._named[1])
        except Exception as error:  # noqa: BLE001 - the run is decided
            # No answer, or the soft time limit was raised right here. The lock is released in
            # the background, and ends with its TTL at the latest.
            logger.warning("Task %s[%s]: %s", *self._named, error, task_id=self._named[1])

    @property
    def _named(self) -> tuple[str, str | None]:
        return self.context.task.name, self.context.request.id


def _ended(task: TaskWithOptions, value: Any) -> Any:
    """The value of a body.

    Raises:
        TypeError: The body has not run, because a decorator hides what kind of function it is.
    """
    refuse_unfinished(
        value,
        f"The body of task {task.name!r}",
        "wait for it, as with asgiref.sync.async_to_sync, or return a list",
    )
    return value


def _remember(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], tuple[Any, Any]]:
    """Return a function that returns the arguments as they are now; a body may change them."""
    if not kwargs and all(type(arg) in _UNCHANGEABLE for arg in args):
        return lambda: (args, {})
    try:
        frozen = pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - whatever the types of the arguments raise
        # Types of a special serializer may not be copyable; assume that they do not change.
        return lambda: (args, kwargs)
    return lambda: pickle.loads(frozen)  # noqa: S301 - pickled a few lines above
