"""``LockedTask``: the base class of tasks that run under a lock."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, NotRegistered, Reject, Retry

from .. import tenancy
from ..databases import errors as database_errors
from ..exceptions import LeaseLost, LockError, LockNotAcquired, RecordedFailure
from ..log import logger
from .binding import bind_body, wrapper_of
from .canvas import callbacks, chords, items
from .delivery import uninterrupted
from .delivery.context import RUN, DeliveryContext, Run
from .delivery.delivery import Delivery
from .first_call import FirstCall
from .options import TaskOptions, TaskWithOptions
from .publishing import copies, follow_ups
from .publishing.broker import is_outage
from .publishing.chosen_words import chosen_words
from .publishing.requeue import give_back
from .publishing.unique import POSITIONAL, publish, send_safely

__all__ = ["LockedTask"]


class LockedTask(TaskWithOptions):
    """A task that holds a lock while it runs, and that can be limited to one run per key.

    The options are class attributes, or arguments of ``shared_task(base=LockedTask, ...)``.
    They are validated when the task is registered. Durations are seconds or ``timedelta``.

    A worker, ``apply()`` and eager mode take the lock; ``map``, ``starmap`` and ``chunks`` take
    it for each item. A direct call takes no lock.

    Attributes:
        lock_key: Template over the arguments, a list of argument names, or a callable; by
            default the task's name and a digest of all arguments. ``None``: no lock.
        lock_ttl, lock_wait, lock_max_hold, lock_min_hold, lock_using: As in ``Lock``;
            by default ``lock_max_hold`` is one second more than the task's hard time limit.
        if_contended: ``"requeue"``, ``"wait"`` (for ``lock_wait``), ``"skip"`` or ``"fail"``.
        contention_timeout: After this time, and at least five attempts, ``requeue`` becomes
            ``fail``; by default twice the broker's visibility timeout, and at least two hours.
        if_unavailable: If the lock's backend does not answer: ``"requeue"``, ``"fail"``,
            ``"local"`` or ``"skip"``.
        if_lost: ``"abort"`` stops the body and requeues its message; ``"finish"`` continues.
        idempotency_key: As ``lock_key``; turns on the idempotency table. It is also the lock's
            key if the task sets no ``lock_key``.
        idempotency_scope: Keys are unique within it; the task's name by default.
        idempotency_payload: Names of the arguments that must be equal under the same key; all
            by default.
        idempotency_ttl: How long a record is kept.
        idempotency_using: The database of the record.
        store_result: Record the result, for ``if_duplicate="return"``.
        store_arguments: Record the arguments, so that an operator can run the task again.
        max_attempts: Runs that may die in the middle, or lose their lease other than by an
            outage, before the task fails; without a record, children that die are not counted.
        if_duplicate: ``"return"`` the recorded result, ``"skip"`` (``None``) or ``"fail"``.
        atomic: Body and record are one transaction of the record's database.
        lock_across_retries: Keep the lock during the countdowns of retries, so that no other
            task of the key runs in between.
        unique_until: Do not publish a task while another one with the same key is pending:
            until that one starts (``"start"``) or is finished (``"done"``). ``delay()`` then
            returns that one's result. With a record, the key is that of record and payload, else
            the lock's.
        unique_ttl: The most seconds for which a pending task drops duplicates, in addition to its
            countdown; an hour by default.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    Request = "django_dlock.celery.parent:LockedRequest"
    # Expected under contention and redelivery, so Celery logs them without a traceback.
    throws = (LockNotAcquired, RecordedFailure)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options when the task is registered, before it first runs.

        Raises:
            ImproperlyConfigured: An option is wrong, or two contradict each other.
        """
        super().on_bound(app)
        if cls.run is not Task.run:
            TaskOptions.read(cls, cls.name)
            bind_body(cls, LockedTask)

    @property
    def current_run(self) -> Run | None:
        """The run of this task's body, with its lock and its attempt.

        ``None`` outside a run, as in ``on_success`` and ``after_return``.
        """
        found = vars(self.request).get(RUN)
        return found if isinstance(found, Run) else None

    def apply_async(self, *args: Any, **options: Any) -> Any:
        """As ``Task.apply_async``; with ``unique_until``, it may return a pending task's result.

        Raises:
            NotRegistered: The task is not registered, so workers would discard the message.
        """
        if self.name not in self.app.tasks:
            raise NotRegistered(
                f"{self.name or type(self).__name__}: a class-based task is not registered "
                f"automatically; call app.register_task({type(self).__name__}()) in a module "
                "that workers import"
            )
        # Raises if there is an error; an error of a receiver of signals would only be logged.
        tenancy.current()
        unique, send = self.dlock_options.unique, super().apply_async
        if self.app.conf.task_always_eager or not (unique or options.get("retries")):
            return send(*args, **options)
        call = {**dict(zip(POSITIONAL, args, strict=False)), **options}
        if unique is None:
            return send_safely(self, send, call)
        return publish(self, unique, send, call)

    def retry(self, *args: Any, **options: Any) -> Any:
        """As ``Task.retry``; during an outage of the broker the message is returned, not lost.

        If the publisher has hidden the arguments with ``argsrepr`` or ``kwargsrepr``, so does the
        new message.
        """
        request = self.request
        options = {**chosen_words(request, request.args or (), request.kwargs or {}), **options}
        try:
            return uninterrupted.call(super().retry, *args, **options)
        except Reject as rejected:
            # Celery's own, with which Celery gives the task up.
            reason: Any = getattr(rejected, "reason", None)
            if isinstance(reason, LeaseLost):
                raise reason from rejected
            # The key of ``unique_until`` may come from a database, which may be away.
            away = is_outage(self.app, reason) or database_errors.is_away_or_busy(reason)
            if self.acks_late and away:
                give_back(reason)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body; under its lock if a worker, ``apply()`` or eager mode calls this."""
        request = self.request
        if request.called_directly:
            if items.is_item(self):
                return items.run(self, args, kwargs)
            return super().__call__(*args, **kwargs)
        first = FirstCall.of(request)
        if first is None:
            return FirstCall.make(request, lambda: self._deliver(args, kwargs))
        if first.running:
            # The body has called its own task directly: the request is that of the body.
            return super().__call__(*args, **kwargs)
        wrapper = wrapper_of(type(self), LockedTask) or type(self)
        return first.repeat(self, wrapper.__qualname__)

    def _deliver(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = self.request
        context = DeliveryContext(self, request, Run(), args, kwargs)
        try:
            result = Delivery(context).execute()
            result = chords.counted_result(self, request, result)
        except (Ignore, Reject, Retry):
            raise
        except Exception as error:
            callbacks.name_errbacks(self.app, request)
            if context.is_copy:
                copies.mark_what_follows(request)
            if not self.store_arguments and isinstance(error, LockError):
                # Celery logs and stores the traceback, which would show what our error comes from.
                error.__cause__ = None
            raise
        callbacks.name_callbacks(self.app, request)
        if context.is_copy:
            copies.mark_what_follows(request)
        return result

    # Celery's own methods return ``None``, unlike its stubs.
    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """As ``DjangoTask.delay_on_commit``; see ``apply_async_on_commit``."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(  # type: ignore[override]
        self, *args: Any, **options: Any
    ) -> None:
        """As ``DjangoTask.apply_async_on_commit``; inside an ``atomic`` body, as ``Run.send``."""
        sending = follow_ups.of_current_body()
        if sending is None:
            super().apply_async_on_commit(*args, **options)
            return
        call = {**dict(zip(POSITIONAL, args, strict=False)), **options}
        signature = self.signature(call.pop("args", None), call.pop("kwargs", None), **call)
        try:
            sending.send(signature)
        except (TypeError, ValueError) as error:
            logger.warning(
                "Task %s is published after the commit, and is lost if the worker dies before "
                "that: %s",
                signature.task,
                error,
                task_id=self.request.id,
            )
            super().apply_async_on_commit(*args, **options)

    def on_replace(self, sig: Any) -> Any:
        """As ``Task.on_replace``; with a record, the replacement is published after its commit."""
        sending = None if self.current_run is None else self.current_run.follow_ups
        if sending is not None and not self.request.is_eager and sending.replace(sig):
            raise Ignore("Replaced by new task")
        return super().on_replace(sig)

    def replace(self, sig: Any) -> Any:
        """As ``Task.replace``; a repeated run sends its replacement under the same ids."""
        return super().replace(callbacks.named_replacement(self.app, self.request, sig))
