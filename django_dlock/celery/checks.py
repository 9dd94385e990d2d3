"""System checks of the tasks that this process knows: pairs of settings that meet badly.

What cannot work at all is refused when the task is registered; these are warnings. Each names
both settings and what will happen. What a task publishes with options of its own
(``apply_async(countdown=...)``), and what the broker's server is told, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from celery import current_app
from django.apps import AppConfig
from django.core import checks

from ..exceptions import InvalidLockBackend
from ..handler import locks
from .requeue import DEFAULT_VISIBILITY_TIMEOUT

__all__ = ["check_tasks", "register"]

VISIBILITY_TIMEOUTS = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), DEFAULT_VISIBILITY_TIMEOUT),
    "sqs": 1800.0,
}
"""Seconds after which brokers deliver a message again, unless told otherwise."""

RABBITMQ_CONSUMER_TIMEOUT = 1800.0
"""Seconds after which RabbitMQ, unless told otherwise, takes back what is not acknowledged."""


def register() -> None:
    """Let ``manage.py check`` look at the tasks."""
    checks.register(check_tasks)


def check_tasks(
    app_configs: Sequence[AppConfig] | None = None, **_: Any
) -> list[checks.CheckMessage]:
    """Warnings about every ``LockedTask`` that is registered with the current app."""
    from .task import LockedTask

    tasks = [task for task in current_app.tasks.values() if isinstance(task, LockedTask)]
    return [warning for task in tasks for warning in _Pairs(task).warnings()]


class _Pairs:
    """The settings of one task that are compared. Durations are seconds, or ``None``."""

    def __init__(self, task: Any) -> None:
        self.task, self.options = task, task.dlock_options
        self.limit: float | None = task.time_limit or task.soft_time_limit
        self.countdown = _retry_countdown(task)
        conf = task.app.conf
        # Workers read from it; of several, each is a replacement for the first.
        read = conf.broker_read_url or ""
        url = str(read if isinstance(read, str) else next(iter(read), ""))
        self.transport = url.partition(":")[0].partition("+")[0]
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

    def warning(self, check_id: str, text: str, hint: str) -> checks.CheckMessage:
        name = self.task.name
        return checks.Warning(f"Task {name!r} {text}", hint=hint, obj=name, id=check_id)

    def acknowledgements(self) -> Iterator[checks.CheckMessage]:
        for option, consequence in (
            ("acks_late", "the message is acknowledged before the body, and lost with its worker"),
            ("reject_on_worker_lost", "a task whose worker is killed is acknowledged and lost"),
        ):
            if not getattr(self.task, option):
                yield self.warning(
                    "django_dlock.W101",
                    f"has {option} off: {consequence}.",
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
                "is not acknowledged when it fails: it comes back for ever.",
                "Leave task_acks_on_failure_or_timeout as it is.",
            )

    def against_the_visibility_timeout(self) -> Iterator[checks.CheckMessage]:
        visibility = self.visibility
        if visibility is None:
            return
        again = f"but the broker delivers its message again after {visibility:g} s"
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
                f"{self.prefetch} messages a process wait behind it, {again}.",
                f"Set worker_prefetch_multiplier = 1, or {raised[0].lower()}{raised[1:]}.",
            )
        if self.countdown >= visibility:
            yield self.warning(
                "django_dlock.W105",
                f"waits up to {self.countdown:g} s for a retry, {again}: each copy waits, too, "
                "and all come due at once.",
                f"{raised}, or retry earlier.",
            )

    def against_the_consumer_timeout(self) -> Iterator[checks.CheckMessage]:
        if self.transport not in ("amqp", "amqps", "pyamqp"):
            return
        for seconds, what in (
            (self.limit or 0, "may run for {:g} s"),
            (self.countdown, "waits up to {:g} s for a retry"),
        ):
            if seconds >= RABBITMQ_CONSUMER_TIMEOUT:
                yield self.warning(
                    "django_dlock.W110",
                    f"{what.format(seconds)}, but RabbitMQ takes back what is not acknowledged "
                    f"within its consumer_timeout, {RABBITMQ_CONSUMER_TIMEOUT:g} s unless you "
                    "changed it, and closes the worker's channel.",
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
                f"{keeps} the broker may deliver a message again after {self.visibility:g} s.",
                "Raise idempotency_ttl above broker_transport_options['visibility_timeout'].",
            )
        if self.options.if_contended == "requeue" and ttl <= self.options.contention_timeout:
            yield self.warning(
                "django_dlock.W106",
                f"{keeps} a copy may be put back for {self.options.contention_timeout:g} s "
                "before it runs, and then run a second time.",
                "Raise idempotency_ttl above contention_timeout.",
            )
        if ttl <= self.countdown:
            yield self.warning(
                "django_dlock.W115",
                f"{keeps} waits up to {self.countdown:g} s for a retry, by when its attempts "
                "are forgotten.",
                "Raise idempotency_ttl, or retry earlier.",
            )

    def patience(self) -> Iterator[checks.CheckMessage]:
        limit, options = self.limit, self.options
        held = options.lock.get("max_hold")
        if options.lock_key is None:
            return
        if limit and held is not None and held < limit:
            yield self.warning(
                "django_dlock.W107",
                f"may run for {limit:g} s, but lock_max_hold takes its lock away after {held:g} s.",
                "Raise lock_max_hold, lower time_limit, or leave lock_max_hold out: it then is "
                "the time limit.",
            )
        if options.if_contended != "requeue":
            return
        if options.lock.get("min_hold"):
            yield self.warning(
                "django_dlock.W111",
                f"keeps its lock for lock_min_hold = {options.lock['min_hold']:g} s, but "
                "if_contended='requeue' runs the copies that it keeps out one after the other.",
                "Set if_contended='skip'.",
            )
        timeout = options.contention_timeout
        if limit and timeout < limit:
            yield self.warning(
                "django_dlock.W108",
                f"may run for {limit:g} s, but one that waits for it fails after a "
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

    def publishing(self) -> Iterator[checks.CheckMessage]:
        unique = self.options.unique
        if unique is None:
            return
        if unique.until == "start" and self.options.if_contended in ("skip", "fail"):
            yield self.warning(
                "django_dlock.W113",
                f"has unique_until='start', but if_contended={self.options.if_contended!r} ends a "
                "pending one that finds another running: what was written before it was enqueued "
                "is seen by nobody.",
                "Leave if_contended at 'requeue', or set unique_until='done'.",
            )
        if unique.until == "done" and self.limit and unique.ttl <= self.limit:
            yield self.warning(
                "django_dlock.W114",
                f"may run for {self.limit:g} s, but keeps others from being published for a "
                f"unique_ttl of {unique.ttl:g} s only.",
                "Raise unique_ttl above time_limit and the time that messages wait.",
            )

    def ttl_of_alias(self) -> float | None:
        try:
            return locks[self.options.lock["using"]].options.ttl
        except InvalidLockBackend:
            # Another check tells what is wrong there.
            return None


def _retry_countdown(task: Any) -> float:
    """Seconds that a retry may be put off at the most, as far as the task itself says."""
    own = getattr(task, "retry_kwargs", {}).get("countdown")
    if getattr(task, "autoretry_for", ()) and getattr(task, "retry_backoff", False):
        return float(getattr(task, "retry_backoff_max", 600))
    return float(task.default_retry_delay or 0 if own is None else own)
