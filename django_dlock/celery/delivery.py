"""One delivery of a task: its lock, its body, and what becomes of its message."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from .. import clock
from ..exceptions import AttemptsExhausted, LeaseLost, NotHeld, StaleToken
from ..lock import Lock
from . import chords, contention, database, owners, parked
from .abort import BodyGuard, LeaseAborted
from .contention import Hold, Skipped
from .recorded import RecordedRun
from .requeue import PutBack, Trail, put_back
from .reservation import Carried

if TYPE_CHECKING:
    from .task import LockedTask

__all__ = ["OWNER", "Delivery", "Run"]

logger = logging.getLogger("django_dlock")

_UNCHANGEABLE = frozenset({bool, bytes, float, int, str, type(None)})

OWNER = "dlock_owner"
"""Under which key of its request a pool's child finds the owner that its parent made."""


@dataclass
class Run:
    """What a body may know of the run that it is part of.

    Attributes:
        lock: ``None`` without exclusion, or where the backend could not be reached.
        scope, key: Of the idempotency record, to be passed on to others who honour such keys;
            empty without one.
        attempt: Of the idempotency record; ``None`` without one.
    """

    lock: Lock | None = None
    scope: str = ""
    key: str = ""
    attempt: int | None = None


class Delivery:
    """Acquire, run, record, release, and answer Celery by returning or raising.

    The lock is always given back before the message is put back: it would meet itself.
    """

    def __init__(
        self,
        task: LockedTask,
        request: Context,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.task, self.request, self.run = task, request, run
        self.args, self.kwargs = args, kwargs
        self.options = task.dlock_options
        self.eager = bool(request.is_eager)
        self.began = clock.now()
        self.guard = BodyGuard() if self.options.if_lost == "abort" else None
        self.hold: Hold | None = None
        # Made by the worker's parent, so that it can name the lease of a child that died; in
        # pools without one, here.
        given: str = vars(request).pop(OWNER, "")
        self.owner = owners.in_child(given, os.getpid()) if given else owners.new(request.id)
        # Celery takes what it does not know for a header; a retry would publish it.
        (request.headers or {}).pop(OWNER, None)
        # Read before the body: running ends contention, and so the header.
        self.trail = Trail.of(request)
        self.carried = Carried(self)
        self._message: Callable[[], tuple[Any, Any]] = lambda: (args, kwargs)

    def work_off(self) -> Any:
        """The body's result, or the recorded one.

        Raises:
            Ignore, Reject: Put back.
            Exception: The body's own, or why it did not run.
        """
        with self.carried:
            return self._work_off()

    def _work_off(self) -> Any:
        try:
            try:
                chords.await_claim(self)
                return self._under(contention.acquire(self))
            except Retry as retry:
                if parked.park(self, retry):
                    self.hold = None
                raise
            finally:
                if self.hold is not None:
                    self._release(self.hold)
        except Skipped:
            return None
        except PutBack as back:
            if self.eager:
                # There is no message to put back.
                raise back.reason from back
            self.carried.put_back = True
            put_back(self.task, self.request, self._message(), back, self.began)

    def body(self) -> Any:
        """Run the body; where ``if_lost="abort"``, until it ends or the lease does."""
        self._message = _remember(self.args, self.kwargs)
        # The body runs, so contention is over; a retry must not inherit its beginning.
        self.trail = parked.trail_of_body(self)
        self.trail.write(self.request)
        if self.guard is None:
            return self.task.run(*self.args, **self.kwargs)
        return self.guard.run(lambda: self.task.run(*self.args, **self.kwargs))

    def loss_behind(self, error: BaseException) -> LeaseLost | None:
        """The loss for which the body was stopped, if that is why it ended with ``error``."""
        guard, lock = self.guard, self.run.lock
        if guard is None or lock is None:
            return None
        if isinstance(error, LeaseLost | StaleToken):
            # Of this lock, and not of another one that the body took for itself.
            ours = isinstance(error, LeaseAborted) or (
                (error.name, error.alias) == (lock.name, lock.alias)
            )
        else:
            # What a body makes of the interruption: a wrapped exception, or a follow-up.
            ours = guard.struck and isinstance(error, Exception)
            ours = ours and not isinstance(error, Ignore | Reject | Retry)
        if not ours:
            return None
        reason = guard.reason or lock.lost_reason or "lost"
        return LeaseLost(
            f"The lease was lost while the task was running: {reason}",
            lock.name,
            lock.alias,
            reason,
        )

    def _under(self, hold: Hold) -> Any:
        self.run.lock = hold if isinstance(hold, Lock) else None
        self.carried.before_the_body(self)
        record = self.options.record
        if record is not None:
            return RecordedRun(self, record, hold).work_off()
        before = database.in_transaction()
        try:
            return self.body()
        except BaseException as error:
            database.mend(error, before, struck=self.struck)
            loss = self.loss_behind(error)
            if loss is None:
                raise
            raise PutBack(loss, self._trail_after(loss)) from error

    def _trail_after(self, loss: LeaseLost) -> Trail:
        """The trail of a task that is to run again.

        Raises:
            AttemptsExhausted: ``max_hold`` ended as many of its runs as may be; it would do so
                for ever.
        """
        if loss.reason != "max_hold":
            return self.trail
        overruns = self.trail.overruns + 1
        if overruns >= self.options.max_attempts:
            raise AttemptsExhausted(f"max_hold stopped {overruns} runs", loss.name, loss.alias)
        return replace(self.trail, overruns=overruns)

    @property
    def struck(self) -> bool:
        """Whether the body was interrupted by the guard."""
        return self.guard is not None and self.guard.struck

    def _release(self, hold: Hold) -> None:
        try:
            hold.release()
        except (LeaseLost, NotHeld) as error:
            # Told when it happened. The run is decided, and the lock does not decide it again.
            logger.debug("Task %s[%s]: %s", self.task.name, self.request.id, error)
        except Exception as error:  # noqa: BLE001 - the run is decided
            # No answer, or the soft time limit at this very moment: what cannot be released
            # is taken back in the background, and ends with its TTL at the latest.
            logger.warning("Task %s[%s]: %s", self.task.name, self.request.id, error)


def _remember(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], tuple[Any, Any]]:
    """The arguments as they are now: a body may change them, but not its message."""
    if not kwargs and all(type(arg) in _UNCHANGEABLE for arg in args):
        return lambda: (args, {})
    try:
        frozen = pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - whatever the types of the arguments raise
        # Of a serializer with types of its own; then they are trusted to stay as they are.
        return lambda: (args, kwargs)
    return lambda: pickle.loads(frozen)  # noqa: S301 - pickled a few lines above
