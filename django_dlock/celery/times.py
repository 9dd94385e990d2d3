"""Celery's times in seconds: moments (from now, a ``datetime``, or its text), and time limits."""

from __future__ import annotations

import datetime as dt
from typing import Any, TypeAlias

from celery import Celery, Task
from celery.app.task import Context
from celery.utils.time import maybe_iso8601, maybe_make_aware

Moment: TypeAlias = float | str | dt.datetime

TIME_LIMIT = "dlock_time_limit"
"""Key of ``delivery_info`` with which a worker's parent tells the limit that it enforces."""


def seconds_until(app: Celery, when: Moment) -> float:
    """Seconds from now, as the worker will compute them; negative if ``when`` is in the past.

    Raises:
        ValueError: The text is not a date and time.
    """
    if isinstance(when, int | float):
        return float(when)
    parsed: Any = maybe_iso8601(when) if isinstance(when, str) else when
    return (maybe_make_aware(parsed, app.timezone) - app.now()).total_seconds()


def time_limit(task: Task[Any, Any], request: Context) -> float | None:
    """The hard time limit of a delivery in seconds; ``None`` if it has none.

    The worker's parent knows it: ``control.time_limit()`` changes the task in the parent only, and
    ``--time-limit`` is no attribute of the task.
    """
    told = (request.delivery_info or {}).get(TIME_LIMIT)
    limit: Any = told or (request.timelimit or (None, None))[0] or task.time_limit
    return float(limit) if limit else None
