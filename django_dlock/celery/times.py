"""Converts Celery's times (seconds from now, a ``datetime``, or its text) into seconds."""

from __future__ import annotations

import datetime as dt
from typing import Any, TypeAlias

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware

__all__ = ["Moment", "seconds_until"]

Moment: TypeAlias = float | str | dt.datetime


def seconds_until(app: Celery, when: Moment) -> float:
    """Seconds from now, as the worker will compute them; negative if ``when`` is in the past.

    Raises:
        ValueError: The text is not a date and time.
    """
    if isinstance(when, int | float):
        return float(when)
    parsed: Any = maybe_iso8601(when) if isinstance(when, str) else when
    return (maybe_make_aware(parsed, app.timezone) - app.now()).total_seconds()
