"""Stable ids for what a task sends when it ends, so that a repeat sends it under the same ids.

Celery makes a new id each time it sends a callback. A task that is delivered twice also sends its
callbacks twice; with the same id, the second copy is recognised as a duplicate.
"""

from __future__ import annotations

import uuid
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.canvas import maybe_signature
from celery.utils.functional import maybe_list

from ...log import logger

_NAMESPACE = uuid.UUID("6e2f0ef5-6a3c-4b0f-9d0c-7d1f6c3c7a51")


def child_id(parent: str, position: str) -> str:
    """The id of the task at this position in the canvas that ``parent`` sends."""
    return str(uuid.uuid5(_NAMESPACE, f"{parent}/{position}"))


def name_callbacks(app: Celery, request: Context) -> None:
    """Give ids to what is sent after a success: links, the rest of a chain, a chord's errbacks.

    Called after the body, because ids would make equal signatures differ, and Celery compares
    them to remove duplicates when a task replaces itself. Never raises: the work is done, and
    Celery sends even a canvas that this module does not understand.
    """
    _name_options(app, request, "callbacks", "chain")


def name_errbacks(app: Celery, request: Context) -> None:
    """Give ids to what is sent after a failure; never raises."""
    _name_options(app, request, "errbacks")


def _name_options(app: Celery, request: Context, *options: str) -> None:
    if request.is_eager:
        return
    try:
        for option in options:
            _name_list(app, vars(request), option, str(request.id))
        _name_errbacks_of_chord(app, request)
    except Exception:
        logger.warning(
            "Task %s: its callbacks cannot get stable ids",
            request.id,
            exc_info=True,
            task_id=request.id,
        )


def named_replacement(app: Celery, request: Context, replacement: Any) -> Any:
    """A copy of a replacement with stable ids; Celery gives its last task the task's own id."""
    # That last task may replace itself again, so the nesting is part of the position.
    position = f"replacement.{request.replaced_task_nesting}"
    try:
        return named(app, replacement, str(request.id), position, own=False)
    except Exception:
        logger.warning(
            "Task %s: its replacement cannot get stable ids",
            request.id,
            exc_info=True,
            task_id=request.id,
        )
        return replacement


def named(app: Celery, found: Any, parent: str, position: str, *, own: bool = True) -> Any:
    """A copy of the signature in which every task has an id.

    Args:
        found: A signature, or its form in a message.
        own: Whether the task that gives the result gets an id, too; for a replacement, Celery
            sets that one itself.
    """
    kind = found.get("subtask_type")
    if kind not in ("chain", "group", "chord") and (not own or "task_id" in found["options"]):
        return found
    signature: Any = maybe_signature(found, app=app, clone=True)
    kwargs, position = signature.kwargs, f"{position}:{signature.task}"
    if kind == "chain":
        last = len(kwargs["tasks"]) - 1
        kwargs["tasks"] = [
            named(app, task, parent, f"{position}.{index}", own=own or index < last)
            for index, task in enumerate(kwargs["tasks"])
        ]
    elif kind == "group":
        kwargs["tasks"] = _members(app, kwargs["tasks"], parent, position)
    elif kind == "chord":
        header = kwargs["header"]
        tasks = header["kwargs"]["tasks"] if isinstance(header, dict) else header
        kwargs["header"] = _members(app, tasks, parent, position)
        if kwargs["body"] is not None:
            kwargs["body"] = named(app, kwargs["body"], parent, f"{position}.body", own=own)
    else:
        signature.options["task_id"] = child_id(parent, position)
    return signature


def _members(app: Celery, tasks: Any, parent: str, position: str) -> list[Any]:
    return [named(app, task, parent, f"{position}.{index}") for index, task in enumerate(tasks)]


def _name_list(app: Celery, options: dict[str, Any], option: str, parent: str) -> None:
    found = maybe_list(options.get(option))
    if found:
        options[option] = [
            named(app, signature, parent, f"{option}.{index}")
            for index, signature in enumerate(found)
        ]


def _name_errbacks_of_chord(app: Celery, request: Context) -> None:
    """Give ids to a chord's errbacks; the member that ends last sends them, failed or not."""
    body: Any = request.chord
    if not body:
        return
    tasks = body["kwargs"]["tasks"] if body.get("subtask_type") == "group" else []
    for signature in (body, *tasks):
        options = signature["options"]
        # The body has an id before its chord's header is sent.
        _name_list(app, options, "link_error", str(options.get("task_id")))
