"""Results of tasks as text for the record: Celery's JSON, limited in size."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Retry
from celery.result import AsyncResult, GroupResult
from kombu.utils import json
from kombu.utils.encoding import safe_repr

from ..log import logger
from ..text.printable import storable

MAX_RESULT = 1024 * 1024
"""Characters of a recorded result; store more in a table or file of your own."""

MAX_ERROR = 10_000
"""Characters of a recorded error."""

NOT_THE_BODY = frozenset({"billiard", "celery", "django_dlock", "kombu"})
"""Packages in which an error is raised for the body, as ``Retry`` is by ``retry()``."""


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


def decode(text: str, *, task: str, task_id: str | None = None) -> Any:
    """The result that ``encode`` was given; ``None`` if none was recorded, or if it is damaged.

    Never raises: the work is done, although somebody else has written its result.
    """
    try:
        return json.loads(text) if text else None
    except Exception as error:  # noqa: BLE001 - whatever Celery's JSON makes of a text
        # Without the error itself, which may quote the result.
        logger.warning(
            "Task %s[%s]: the recorded result is damaged, so this duplicate gets None: %s",
            task,
            task_id,
            type(error).__name__,
            task_id=task_id,
        )
        return None


def ignores_result(task: Task[Any, Any], request: Context) -> bool:
    """Whether no result of this delivery is stored; its publisher may have said otherwise."""
    told = vars(request).get("ignore_result")
    return bool(task.ignore_result if told is None else told)


def stored_failure(task: Task[Any, Any], request: Context) -> Exception | None:
    """The error with which the task has failed, from the result backend; never raises.

    ``None`` if the backend does not know it: results may be ignored, or expired.
    """
    if request.is_eager or ignores_result(task, request):
        return None
    try:
        found: Any = task.backend.get_task_meta(request.id or "", cache=False)
        error = found["result"] if found["status"] == states.FAILURE else None
    except Exception:  # noqa: BLE001 - whatever result backends raise
        return None
    return error if isinstance(error, Exception) else None


def describe(error: BaseException, *, private: bool = False) -> str:
    """The error as text that every database can store; never raises.

    Args:
        private: Its text may contain arguments that must not be stored, so keep only its type and
            the place where it was raised: ``ValueError(…) at shop/tasks.py:12 in charge``.
    """
    text: str = _kind(error) + _place(error.__traceback__) if private else safe_repr(error)
    return storable(text[:MAX_ERROR])


def _kind(error: BaseException) -> str:
    inner = error.exc if isinstance(error, Retry) else None
    inside = _kind(inner) if isinstance(inner, BaseException) else "…"
    return f"{type(error).__name__}({inside})"


def _place(trace: TracebackType | None) -> str:
    """File, line and function of the innermost call that is not one of Celery or of ours."""
    found = None
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if found is None or package not in NOT_THE_BODY:
            found = trace
        trace = trace.tb_next
    if found is None:
        return ""
    code = found.tb_frame.f_code
    return f" at {code.co_filename}:{found.tb_lineno} in {code.co_name}"
