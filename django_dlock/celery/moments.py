"""Moments in the forms that Celery takes: seconds from now, a ``datetime``, or its text."""

from __future__ import annotations

import datetime as dt
from typing import Any, TypeAlias

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware

__all__ = ["Moment", "seconds_until"]

Moment: TypeAlias = float | str | dt.datetime


def seconds_until(app: Celery, when: Moment) -> float:
    """Seconds from now, as the worker will count them; negative for what is past.

    Raises:
        ValueError: A text that is no moment.
    """
    if isinstance(when, int | float):
        return float(when)
    moment: Any = maybe_iso8601(when) if isinstance(when, str) else when
    return (maybe_make_aware(moment, app.timezone) - app.now()).total_seconds()
