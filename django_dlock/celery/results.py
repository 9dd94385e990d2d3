"""Results of tasks as text: Celery's own tagged JSON, of limited size."""

from __future__ import annotations

from typing import Any

from kombu.utils import json
from kombu.utils.encoding import safe_repr

__all__ = ["MAX_RESULT", "decode", "describe", "encode"]

MAX_RESULT = 1024 * 1024
"""Characters of a recorded result; more belongs into a table or file of its own."""

MAX_ERROR = 10_000
"""Characters of a recorded error."""


def encode(result: Any, *, task: str) -> str:
    """The result as it is recorded; called before COMMIT, so that an error rolls back.

    Raises:
        TypeError: JSON cannot hold it, not even with the types that kombu tags.
        ValueError: It is too large.
    """
    cure = f"return something else from task {task!r}, or set store_result=False"
    try:
        text: str = json.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the result {result!r:.80} cannot be recorded ({error}); {cure}"
        ) from error
    if len(text) > MAX_RESULT:
        raise ValueError(
            f"the result has {len(text)} characters as JSON, more than the {MAX_RESULT} that can "
            f"be recorded; {cure}"
        )
    return text


def decode(text: str) -> Any:
    """The result that ``encode`` was given; ``None`` where none was recorded."""
    return json.loads(text) if text else None


def describe(error: BaseException) -> str:
    """The error as any database can record it; never raises."""
    text: str = safe_repr(error)
    # PostgreSQL holds no NUL, and no database holds a lone surrogate.
    text = text[:MAX_ERROR].replace("\x00", "\\x00")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
