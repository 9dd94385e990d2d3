"""System checks of the registered tasks: warnings about settings that do not fit together.

What cannot work at all is refused when the task is registered. Each warning names both settings
and what will happen. Options of single messages (``apply_async(countdown=...)``) and settings of
the broker's server are not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from celery import Celery, Task, current_app
from django.core import checks

from ..backends.base import AliasOptions
from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..log import logger
from .binding import bypasses, wrapper_of
from .delivery.locking import contention_timeout
from .options import TaskWithOptions
from .publishing.broker import (
    CONSUMER_TIMEOUT,
    VISIBILITY_TIMEOUTS,
    forgets_what_it_delivers,
    read_transport,
)
from .spelling import PREFIXES
from .task import LockedTask

OF_LOCK = {
    "ttl": "lock_ttl",
    "wait": "lock_wait",
    "timeout": "lock_wait, or lock_ttl",
    "max_hold": "lock_max_hold",
    "min_hold": "lock_min_hold",
    "using": "lock_using",
    "unique": "unique_until",
}
"""Options elsewhere that may also be a task's own attributes, and the task options for them."""

OURS = tuple(name for name in TaskWithOptions.__annotations__ if name.startswith(PREFIXES))

_importing = threading.Lock()


def check_tasks() -> list[checks.CheckMessage]:
    """Check all tasks of the current app; imports them first.

    In Celery's usual layout ``autodiscover_tasks()`` imports them in workers only.
    """
    if not _importing.acquire(blocking=False):
        # Celery runs Django's checks before it imports tasks, so our import calls this again.
        return []
    app = current_app
    try:
        app.loader.import_default_modules()
        pairs = [_Pairs(task) for task in app.tasks.values() if isinstance(task, TaskWithOptions)]
    except Exception as error:  # noqa: BLE001 - whatever a module of the project raises
        # Celery has already marked the app as finalized. Undo that, or a worker that runs this
        # check would start in spite of the error.
        app.finalized = False  # type: ignore[attr-defined] # not in the stubs
        return [
            checks.Error(
                f"The tasks cannot be imported: {type(error).__name__}: {error}",
                hint="A worker cannot import them either; see the message.",
                id="django_dlock.E101",
            )
        ]
    finally:
        _importing.release()
    found = [warning for pair in pairs for warning in pair.warnings()]
    return [*found, *_forgetful_broker(pairs), *_misplaced(app)]


def log_task_warnings(**_: Any) -> None:
    """Log the warnings when a worker starts; Celery runs Django's checks but does not show them."""
    for message in check_tasks():
        if not message.is_silenced():
            hint = f" {message.hint}" if message.hint else ""
            logger.warning("%s: %s%s", message.id, message.msg, hint)


class _Pairs:
    """The settings of one task that are compared; durations in seconds, or ``None``."""

    def __init__(self, task: Any) -> None:
        self.task, self.options = task, task.dlock_options
        self.limit: float | None = task.time_limit or task.soft_time_limit
        self.countdown, self.delayed_by = _retry_countdown(task)
        self.contention_timeout = contention_timeout(task)
        conf = task.app.conf
        self.transport = read_transport(task.app)
        self.prefetch = conf.worker_prefetch_multiplier or 0
        self.visibility: float | None = None
        default = VISIBILITY_TIMEOUTS.get(self.transport)
        if default is not None:
            options = conf.broker_transport_options or {}
            self.visibility = float(options.get("visibility_timeout") or default)

    def warnings(self) -> Iterator[checks.CheckMessage]:
        yield from self.acknowledgements()
        yield from self.against_the_visibility_timeout()
        yield from self.against_the_consumer_timeout()
        yield from self.retention()
        yield from self.patience()
        yield from self.publishing()
        yield from self.wrapping()

    def warning(self, check_id: str, text: str, hint: str) -> checks.CheckMessage:
        name = self.task.name
        return checks.Warning(f"Task {name!r} {text}", hint=hint, obj=name, id=check_id)

    def acknowledgements(self) -> Iterator[checks.CheckMessage]:
        for option, consequence in (
            ("acks_late", "the message is acknowledged before the body, and lost with its worker"),
            ("reject_on_worker_lost", "if its worker is killed, it is acknowledged and lost"),
        ):
            if not getattr(self.task, option):
                yield self.warning(
                    "django_dlock.W101",
                    f"has {option}=False: {consequence}.",
                    f"Leave {option} as LockedTask sets it.",
                )
        # Celery 5.5 has one option for both.
        both = getattr(self.task, "acks_on_failure_or_timeout", None)
        options = (
            getattr(self.task, name, both) for name in ("acks_on_failure", "acks_on_timeout")
        )
        if any(option is False for option in options):
            yield self.warning(
                "django_dlock.W102",
                "is not acknowledged when it fails: it is redelivered for ever.",
                "Leave task_acks_on_failure_or_timeout as it is.",
            )

    def against_the_visibility_timeout(self) -> Iterator[checks.CheckMessage]:
        visibility = self.visibility
        if visibility is None:
            return
        again = f"but the broker redelivers its message after {visibility:g} s"
        raised = "Raise broker_transport_options['visibility_timeout']"
        if self.limit and self.limit >= visibility:
            yield self.warning(
                "django_dlock.W103",
                f"may run for {self.limit:g} s, {again}.",
                f"{raised}, or lower time_limit.",
            )
        elif self.limit and self.limit * (self.prefetch + 1) > visibility:
            yield self.warning(
                "django_dlock.W109",
                f"may run for {self.limit:g} s, and worker_prefetch_multiplier lets "
                f"{self.prefetch} messages per process wait behind it, {again}.",
                f"Set worker_prefetch_multiplier = 1, or {raised[0].lower()}{raised[1:]}.",
            )
        if self.countdown >= visibility:
            yield self.warning(
                "django_dlock.W105",
                f"waits up to {self.countdown:g} s for a retry, {again}: each copy waits, too, "
                "and all run at the same time.",
                f"{raised}, or lower {self.delayed_by}.",
            )

    def against_the_consumer_timeout(self) -> Iterator[checks.CheckMessage]:
        if self.transport not in ("amqp", "amqps", "pyamqp"):
            return
        for seconds, what in (
            (self.limit or 0, "may run for {:g} s"),
            (self.countdown, "waits up to {:g} s for a retry"),
        ):
            if seconds >= CONSUMER_TIMEOUT:
                yield self.warning(
                    "django_dlock.W110",
                    f"{what.format(seconds)}, but RabbitMQ requeues a message that is not "
                    "acknowledged within its consumer_timeout "
                    f"({CONSUMER_TIMEOUT:g} s unless you changed it), and closes the "
                    "worker's channel.",
                    "Raise consumer_timeout at the server and silence this check, or lower the "
                    "time.",
                )

    def retention(self) -> Iterator[checks.CheckMessage]:
        record = self.options.record
        if record is None:
            return
        ttl = record.ttl.total_seconds()
        keeps = f"keeps its records for {ttl:g} s, but"
        if self.visibility is not None and ttl <= self.visibility:
            yield self.warning(
                "django_dlock.W104",
                f"{keeps} the broker may redeliver a message after {self.visibility:g} s.",
                "Raise idempotency_ttl above broker_transport_options['visibility_timeout'].",
            )
        if self.task.if_contended == "requeue" and ttl <= self.contention_timeout:
            yield self.warning(
                "django_dlock.W106",
                f"{keeps} a duplicate may be requeued for {self.contention_timeout:g} s, and "
                "would then run the work a second time.",
                "Raise idempotency_ttl above contention_timeout.",
            )
        if ttl <= self.countdown:
            yield self.warning(
                "django_dlock.W115",
                f"{keeps} waits up to {self.countdown:g} s for a retry: by then the number of "
                "its attempts is deleted.",
                f"Raise idempotency_ttl, or lower {self.delayed_by}.",
            )

    def patience(self) -> Iterator[checks.CheckMessage]:
        limit, options = self.limit, self.options
        held = options.lock.get("max_hold")
        if options.lock_key is None:
            return
        if limit and held is not None and held < limit:
            yield self.warning(
                "django_dlock.W107",
                f"may run for {limit:g} s, but lock_max_hold ends its lock after {held:g} s.",
                "Raise lock_max_hold, lower time_limit, or leave lock_max_hold out: it then "
                "follows the time limit.",
            )
        if self.task.if_contended == "wait":
            yield from self.wait()
        if self.task.if_contended != "requeue":
            return
        if options.lock.get("min_hold"):
            yield self.warning(
                "django_dlock.W111",
                f"keeps its lock for lock_min_hold = {options.lock['min_hold']:g} s, but "
                "if_contended='requeue' then runs the other tasks of the key one by one.",
                "Set if_contended='skip'.",
            )
        timeout = self.contention_timeout
        if limit and timeout < limit:
            yield self.warning(
                "django_dlock.W108",
                f"may run for {limit:g} s, but a task that waits for it fails after a "
                f"contention_timeout of {timeout:g} s.",
                "Raise contention_timeout above time_limit.",
            )
        ttl = options.lock.get("ttl") or self.ttl_of_alias()
        if ttl is not None and timeout <= ttl:
            yield self.warning(
                "django_dlock.W112",
                f"fails after a contention_timeout of {timeout:g} s, but the lock of a dead "
                f"worker may live for its TTL of {ttl:g} s.",
                "Raise contention_timeout above lock_ttl.",
            )
        elif self.visibility is not None and (limit or 0) <= timeout <= self.visibility:
            yield self.warning(
                "django_dlock.W116",
                f"fails after a contention_timeout of {timeout:g} s, but the broker redelivers the "
                f"message of a dead worker only after {self.visibility:g} s: the tasks that wait "
                "for it fail.",
                "Leave contention_timeout out, or raise it above "
                "broker_transport_options['visibility_timeout'].",
            )

    def wait(self) -> Iterator[checks.CheckMessage]:
        own, alias = self.options.lock, self.alias()
        wait = own.get("wait", alias and alias.wait)
        limits = ((name, getattr(self.task, name)) for name in ("soft_time_limit", "time_limit"))
        name, limit = next(((name, limit) for name, limit in limits if limit), ("", 0.0))
        if limit and alias and (wait is None or wait >= limit):
            long = "for ever" if wait is None else f"for up to {wait:g} s"
            yield self.warning(
                "django_dlock.W119",
                f"waits {long} for its lock, but its {name} of {limit:g} s counts meanwhile: it "
                "fails although its body never began.",
                f"Lower lock_wait, or raise {name} by it.",
            )

    def publishing(self) -> Iterator[checks.CheckMessage]:
        unique = self.options.unique
        if unique is None:
            return
        if unique.until == "start" and self.task.if_contended in ("skip", "fail"):
            yield self.warning(
                "django_dlock.W113",
                f"has unique_until='start', but if_contended={self.task.if_contended!r} ends a "
                "pending task that finds another one running: then no task sees what was written "
                "before it was enqueued.",
                "Leave if_contended at 'requeue', or set unique_until='done'.",
            )
        if unique.until == "done" and self.limit and unique.ttl <= self.limit:
            yield self.warning(
                "django_dlock.W114",
                f"may run for {self.limit:g} s, but drops duplicates only for a unique_ttl of "
                f"{unique.ttl:g} s.",
                "Raise unique_ttl above time_limit and the time that messages wait.",
            )

    def wrapping(self) -> Iterator[checks.CheckMessage]:
        kind = type(self.task)
        if not issubclass(kind, LockedTask):
            return
        wrapper = wrapper_of(kind, LockedTask)
        if wrapper is not None and bypasses(wrapper):
            yield self.warning(
                "django_dlock.W118",
                f"has a base class {wrapper.__qualname__!r} whose __call__ never calls that of "
                "LockedTask: its runs fail, because they would take no lock.",
                "Call super().__call__(*args, **kwargs) there, instead of self.run().",
            )

    def ttl_of_alias(self) -> float | None:
        alias = self.alias()
        return None if alias is None else alias.ttl

    def alias(self) -> AliasOptions | None:
        try:
            return locks[self.options.lock["using"]].options
        except InvalidLockBackend:
            # Another check reports what is wrong there.
            return None


def _forgetful_broker(pairs: list[_Pairs]) -> Iterator[checks.CheckMessage]:
    """One warning, however many tasks have a record."""
    recorded = [pair for pair in pairs if pair.options.record is not None]
    # Messages in memory are those of tests.
    transport = recorded[0].transport if recorded else "memory"
    if transport != "memory" and forgets_what_it_delivers(transport):
        yield checks.Warning(
            f"The broker {transport!r} deletes a message when a worker receives it. If the worker "
            "is killed, its unfinished messages are lost, even those of tasks with an "
            f"idempotency_key such as {recorded[0].task.name!r}.",
            hint="Use RabbitMQ or Redis; or restore the messages after a kill, see 'Brokers that "
            "forget' in the documentation, and silence this check.",
            id="django_dlock.W117",
        )


def _retry_countdown(task: Any) -> tuple[float, str]:
    """The longest countdown of a retry in seconds, as far as the task sets it, and the option."""
    own = getattr(task, "retry_kwargs", {}).get("countdown")
    if getattr(task, "autoretry_for", ()) and getattr(task, "retry_backoff", False):
        return float(getattr(task, "retry_backoff_max", 600)), "retry_backoff_max"
    if own is None:
        return float(task.default_retry_delay or 0), "default_retry_delay"
    return float(own), "retry_kwargs['countdown']"


def _misplaced(app: Celery) -> Iterator[checks.CheckMessage]:
    """W120 and W121: options of ours on other tasks, and options of others on ours."""
    for task in app.tasks.values():
        kind = type(task)
        if isinstance(task, TaskWithOptions):
            own = kind.__mro__[: kind.__mro__.index(TaskWithOptions)]
            for option in sorted(_set_on(own) & OF_LOCK.keys()):
                yield checks.Warning(
                    f"Task {task.name!r} has {option}, which is not an option of "
                    "LockedTask: it has no effect.",
                    hint=f"Use {OF_LOCK[option]}, or silence this if {option} is yours.",
                    obj=task.name,
                    id="django_dlock.W121",
                )
        elif found := sorted(_set_on(kind.__mro__) & set(OURS)):
            yield checks.Warning(
                f"Task {task.name!r} has {', '.join(found)}, but is not a LockedTask: it takes no "
                "lock and keeps no record.",
                hint="Set base=LockedTask.",
                obj=task.name,
                id="django_dlock.W120",
            )


def _set_on(classes: tuple[type[Any], ...]) -> set[str]:
    return {name for kind in classes if kind not in (object, Task) for name in vars(kind)}
