"""Results of tasks as text for the record: Celery's JSON, limited in size."""

from __future__ import annotations

from typing import Any

from celery.result import AsyncResult, GroupResult
from kombu.utils import json
from kombu.utils.encoding import safe_repr

from ..log import logger

__all__ = ["MAX_RESULT", "decode", "describe", "encode"]

MAX_RESULT = 1024 * 1024
"""Characters of a recorded result; store more in a table or file of your own."""

MAX_ERROR = 10_000
"""Characters of a recorded error."""


def encode(result: Any, *, task: str, task_id: str | None = None) -> str:
    """The result as text for the record; if it cannot be recorded, an empty text and a warning.

    Celery's own results (``AsyncResult``, ``GroupResult``) are recorded as its backends store
    them. Never raises: the work is done, whatever it returned.
    """
    try:
        if isinstance(result, AsyncResult | GroupResult):
            result = result.as_tuple()
        text: str = json.dumps(result)
    except Exception as error:  # noqa: BLE001 - whatever the types of a result raise
        why = f"{safe_repr(error):.200}"
    else:
        if len(text) <= MAX_RESULT:
            return text
        why = f"it has {len(text)} characters as JSON, and {MAX_RESULT} can be recorded"
    logger.warning(
        "Task %s: the result is not recorded, so duplicates get None: %s. Return something "
        "else, or set store_result=False",
        task,
        why,
        task_id=task_id,
    )
    return ""


def decode(text: str) -> Any:
    """The result that ``encode`` was given; ``None`` if none was recorded."""
    return json.loads(text) if text else None


def describe(error: BaseException) -> str:
    """The error as text that every database can store; never raises."""
    text: str = safe_repr(error)
    # PostgreSQL stores no NUL, and no database stores a lone surrogate.
    text = text[:MAX_ERROR].replace("\x00", "\\x00")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
