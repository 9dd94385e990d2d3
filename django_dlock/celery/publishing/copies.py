"""Marks messages that may be published twice under one task id.

If the first one runs and fails for good, the second one must not run; see ``RequeueHeader.outbox``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.app.task import Context
from celery.utils.functional import maybe_list

from ...log import logger
from .header import HEADER


def mark(found: Any) -> None:
    """Mark a signature, or its form in a message, in place; with all tasks of a canvas."""
    options, kwargs = found["options"], found.get("kwargs") or {}
    headers = dict(options.get("headers") or {})
    ours = headers.get(HEADER)
    headers[HEADER] = {**(ours if isinstance(ours, Mapping) else {}), "outbox": 1}
    options["headers"] = headers
    kind = found.get("subtask_type")
    if kind in ("chain", "group"):
        _mark_all(kwargs["tasks"])
    elif kind == "chord":
        _mark_all(kwargs["header"])
        _mark_all(kwargs.get("body"))


def is_marked(headers: object) -> int:
    """1 if the headers of a message have the mark; else 0."""
    ours = headers.get(HEADER) if isinstance(headers, Mapping) else None
    return int(isinstance(ours, Mapping) and ours.get("outbox") == 1)


def mark_what_follows(request: Context) -> None:
    """Mark what Celery sends when this task ends, if an earlier delivery may have sent it.

    Never raises, because the outcome of the task is decided.
    """
    if request.is_eager:
        return
    try:
        for option in ("callbacks", "errbacks", "chain", "chord"):
            _mark_all(vars(request).get(option))
    except Exception:
        logger.warning(
            "Task %s: its callbacks cannot be marked as repeated",
            request.id,
            exc_info=True,
            task_id=request.id,
        )


def _mark_all(found: Any) -> None:
    for each in maybe_list(found) or ():
        mark(each)
