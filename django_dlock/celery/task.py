"""``LockedTask``: the base class of tasks that run under a lock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from celery import Celery, Task
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore, NotRegistered, Reject, Retry

from ..exceptions import LockNotAcquired
from ..lock_options import DEFAULT, Default, Seconds
from . import callbacks, chords, items
from .delivery import Delivery, Run
from .options import TaskOptions
from .requeue import go_back, is_outage
from .unique import POSITIONAL, publish, send_safely

__all__ = ["LockedTask"]

Key: TypeAlias = str | Sequence[str] | Callable[..., Any]

if TYPE_CHECKING:
    _Base = DjangoTask[..., Any]
else:
    _Base = DjangoTask


class LockedTask(_Base):
    """A task that holds a lock while it runs, and may run once per key only.

    The options are class attributes, or arguments of ``shared_task(base=LockedTask, ...)``.
    They are validated when the task is registered. Durations are seconds or ``timedelta``.

    Calling the task directly takes no lock; a worker, ``apply()`` and eager mode do, and so do
    ``map``, ``starmap`` and ``chunks`` for each of their items.

    Attributes:
        lock_key: Template over the arguments, a list of argument names, or a callable; by
            default the task's name and a digest of all arguments. ``None``: no exclusion.
        lock_ttl, lock_wait, lock_max_hold, lock_min_hold, lock_using: As in ``Lock``;
            ``lock_max_hold`` is the task's hard time limit by default, and a second.
        if_contended: ``"requeue"``, ``"wait"`` (for ``lock_wait``), ``"skip"`` or ``"fail"``.
        contention_timeout: After so long, ``requeue`` becomes ``fail``.
        if_unavailable: When the lock's backend does not answer: ``"requeue"``, ``"fail"``,
            ``"local"`` or ``"skip"``.
        if_lost: ``"abort"`` stops the body and puts its message back; ``"finish"`` goes on.
        idempotency_key: As ``lock_key``; turns the idempotency table on, and is the lock's key
            too where there is none of its own.
        idempotency_scope: What keys are unique in; the task's name by default.
        idempotency_payload: Names of the arguments that must be equal under the same key; all
            by default.
        idempotency_ttl: How long a record is kept.
        idempotency_using: The database of the record.
        store_result: Record the result, for ``if_duplicate="return"``.
        max_attempts: Runs that may die in the middle, or be stopped by ``max_hold``, before the
            task fails; without a record, deaths are not counted.
        if_duplicate: ``"return"`` the recorded result, ``"skip"`` (``None``) or ``"fail"``.
        atomic: Body and record are one transaction of the record's database.
        lock_across_retries: Keep the lock through the countdowns of retries; nobody comes in
            between.
        unique_until: Not published while one of the same key (of the lock; of the record and its
            payload where there is one) is pending: until that one begins (``"start"``), or is
            over (``"done"``). ``delay()`` gives its result.
        unique_ttl: The longest that one may keep others out, besides its countdown; an hour.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    Request = "django_dlock.celery.parent:LockedRequest"
    # Expected under contention; Celery then logs the failure without a traceback.
    throws = (LockNotAcquired,)

    lock_key: Key | Default | None = DEFAULT
    lock_ttl: Seconds | None = None
    lock_wait: Seconds | Default | None = DEFAULT
    lock_max_hold: Seconds | Default = DEFAULT
    lock_min_hold: Seconds | None = None
    lock_using: str = "default"
    if_contended: Literal["requeue", "wait", "skip", "fail"] = "requeue"
    contention_timeout: Seconds = 3600.0
    if_unavailable: Literal["requeue", "fail", "local", "skip"] = "requeue"
    if_lost: Literal["abort", "finish"] = "abort"
    lock_across_retries: bool = False
    idempotency_key: Key | None = None
    idempotency_scope: str | None = None
    idempotency_payload: Sequence[str] | None = None
    idempotency_ttl: Seconds = 7 * 24 * 3600.0
    idempotency_using: str = "default"
    store_result: bool = True
    max_attempts: int = 5
    if_duplicate: Literal["return", "skip", "fail"] = "return"
    atomic: bool = False
    unique_until: Literal["start", "done"] | None = None
    unique_ttl: Seconds | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options when the task is registered, not when it first runs.

        Raises:
            ImproperlyConfigured: An option is wrong, or two contradict each other.
        """
        super().on_bound(app)
        if cls.run is not Task.run:
            TaskOptions.read(cls, cls.name)

    @functools.cached_property
    def dlock_options(self) -> TaskOptions:
        """The validated options; facts of the task, never of one run."""
        return TaskOptions.read(type(self), self.name)

    @property
    def current_run(self) -> Run | None:
        """The run that this worker is in, with its lock and its attempt; ``None`` outside."""
        found = vars(self.request).get("dlock_run")
        return found if isinstance(found, Run) else None

    def apply_async(self, *args: Any, **options: Any) -> Any:
        """As ``Task.apply_async``; with ``unique_until``, maybe of a task that is pending already.

        Raises:
            NotRegistered: No worker knows the task: it would be discarded there unseen.
        """
        if self.name not in self.app.tasks:
            raise NotRegistered(
                f"{self.name or type(self).__name__}: a class-based task is not registered by "
                f"itself; say app.register_task({type(self).__name__}()) where workers import it"
            )
        unique, send = self.dlock_options.unique, super().apply_async
        if self.app.conf.task_always_eager or not (unique or options.get("retries")):
            return send(*args, **options)
        call = {**dict(zip(POSITIONAL, args, strict=False)), **options}
        if unique is None:
            return send_safely(self, send, call)
        return publish(self, unique, send, call)

    def retry(self, *args: Any, **options: Any) -> Any:
        """As ``Task.retry``; where the broker is away, the message goes back and is not lost."""
        try:
            return super().retry(*args, **options)
        except Reject as rejected:
            # Celery's own, which gives the task up.
            reason: Any = getattr(rejected, "reason", None)
            if self.acks_late and is_outage(self.app, reason):
                go_back(reason)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The body; under its lock where a worker, ``apply()`` or eager mode calls."""
        request = self.request
        # A body that calls its own task finds its own request again.
        if "dlock_run" in vars(request):
            return super().__call__(*args, **kwargs)
        if request.called_directly:
            if items.is_item(self):
                return items.run(self, args, kwargs)
            return super().__call__(*args, **kwargs)
        run = Run()
        vars(request)["dlock_run"] = run
        try:
            result = Delivery(self, request, run, args, kwargs).work_off()
            result = chords.counted_result(self, request, result)
        except (Ignore, Reject, Retry):
            raise
        except Exception:
            callbacks.name_errbacks(self.app, request)
            raise
        callbacks.name_callbacks(self.app, request)
        return result

    def replace(self, sig: Any) -> Any:
        """As ``Task.replace``; a run that is repeated sends its replacement under the same ids."""
        return super().replace(callbacks.named_replacement(self.app, self.request, sig))
