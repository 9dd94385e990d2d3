"""System checks of the tasks that this process knows.

What cannot work at all is refused when the task is registered; these are warnings about
settings that meet badly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from celery import current_app
from django.apps import AppConfig
from django.core import checks

from .requeue import DEFAULT_VISIBILITY_TIMEOUT

__all__ = ["check_tasks", "register"]

TRANSPORTS = ("redis", "rediss", "sentinel", "sqs")
"""Brokers that deliver a message again after a visibility timeout."""


def register() -> None:
    """Let ``manage.py check`` look at the tasks."""
    checks.register(check_tasks)


def check_tasks(
    app_configs: Sequence[AppConfig] | None = None, **_: Any
) -> list[checks.CheckMessage]:
    """Warnings about every ``LockedTask`` that is registered with the current app."""
    from .task import LockedTask

    tasks = [task for task in current_app.tasks.values() if isinstance(task, LockedTask)]
    return [warning for task in tasks for warning in _warnings(task)]


def _warnings(task: Any) -> Iterator[checks.CheckMessage]:
    for option, consequence in (
        ("acks_late", "the message is acknowledged before the body, and lost with its worker"),
        ("reject_on_worker_lost", "a task whose worker is killed is acknowledged and lost"),
    ):
        if not getattr(task, option):
            yield checks.Warning(
                f"Task {task.name!r} has {option} off: {consequence}.",
                hint=f"Leave {option} as LockedTask sets it.",
                obj=task.name,
                id="django_dlock.W101",
            )
    # Celery 5.5 has one option for both.
    both = getattr(task, "acks_on_failure_or_timeout", None)
    options = (getattr(task, name, both) for name in ("acks_on_failure", "acks_on_timeout"))
    if any(option is False for option in options):
        yield checks.Warning(
            f"Task {task.name!r} is not acknowledged when it fails: it comes back for ever.",
            hint="Leave task_acks_on_failure_or_timeout as it is.",
            obj=task.name,
            id="django_dlock.W102",
        )
    yield from _against_visibility_timeout(task)


def _against_visibility_timeout(task: Any) -> Iterator[checks.CheckMessage]:
    conf = task.app.conf
    transport = str(conf.broker_url or "").partition(":")[0]
    if transport not in TRANSPORTS:
        return
    options = conf.broker_transport_options or {}
    visibility = float(options.get("visibility_timeout") or DEFAULT_VISIBILITY_TIMEOUT)
    if task.time_limit and task.time_limit >= visibility:
        yield checks.Warning(
            f"Task {task.name!r} may run for {task.time_limit:g} s, but the broker delivers its "
            f"message again after {visibility:g} s.",
            hint="Raise broker_transport_options['visibility_timeout'], or lower time_limit.",
            obj=task.name,
            id="django_dlock.W103",
        )
    record = task.dlock_options.record
    if record is not None and record.ttl.total_seconds() <= visibility:
        yield checks.Warning(
            f"Task {task.name!r} keeps its records for {record.ttl.total_seconds():g} s, but the "
            f"broker may deliver a message again after {visibility:g} s.",
            hint="Raise idempotency_ttl above broker_transport_options['visibility_timeout'].",
            obj=task.name,
            id="django_dlock.W104",
        )
