"""Names what a task sends when it ends, so that a repeat sends it under the same ids.

Celery draws a new id each time it sends a callback. A task that is delivered again ends again and
sends its callbacks again; under the same id the second copy is known for what it is.
"""

from __future__ import annotations

import uuid
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.canvas import maybe_signature
from celery.utils.functional import maybe_list

__all__ = ["child_id", "name_callbacks", "name_errbacks", "named", "named_replacement"]

_NAMESPACE = uuid.UUID("6e2f0ef5-6a3c-4b0f-9d0c-7d1f6c3c7a51")


def child_id(parent: str, place: str) -> str:
    """The id of the task at ``place`` in what the task ``parent`` sends."""
    return str(uuid.uuid5(_NAMESPACE, f"{parent}/{place}"))


def name_callbacks(app: Celery, request: Context) -> None:
    """Name what is sent after a success: links, the rest of the chain, a failed chord's errbacks.

    Called when the body has ended, not before: Celery compares signatures to leave out doubles
    when a task replaces itself, and names would make equal ones differ.
    """
    if request.is_eager:
        return
    for option in ("callbacks", "chain"):
        _name_list(app, vars(request), option, str(request.id))
    _name_errbacks_of_chord(app, request)


def name_errbacks(app: Celery, request: Context) -> None:
    """Name what is sent after a failure."""
    if request.is_eager:
        return
    _name_list(app, vars(request), "errbacks", str(request.id))
    _name_errbacks_of_chord(app, request)


def named_replacement(app: Celery, request: Context, replacement: Any) -> Any:
    """A copy of what a task replaces itself with; Celery gives its result the task's own id."""
    # The replacement's last task has the same id as this one, and may replace itself in turn.
    place = f"replacement.{request.replaced_task_nesting}"
    return named(app, replacement, str(request.id), place, own=False)


def named(app: Celery, found: Any, parent: str, place: str, *, own: bool = True) -> Any:
    """A copy of the signature in which all that had no id has one.

    Args:
        found: A signature, or its form in a message.
        own: Whether what gives its result is named, too; Celery names a replacement's itself.
    """
    kind = found.get("subtask_type")
    if kind not in ("chain", "group", "chord") and (not own or "task_id" in found["options"]):
        return found
    signature: Any = maybe_signature(found, app=app, clone=True)
    kwargs, place = signature.kwargs, f"{place}:{signature.task}"
    if kind == "chain":
        last = len(kwargs["tasks"]) - 1
        kwargs["tasks"] = [
            named(app, task, parent, f"{place}.{index}", own=own or index < last)
            for index, task in enumerate(kwargs["tasks"])
        ]
    elif kind == "group":
        kwargs["tasks"] = _members(app, kwargs["tasks"], parent, place)
    elif kind == "chord":
        header = kwargs["header"]
        tasks = header["kwargs"]["tasks"] if isinstance(header, dict) else header
        kwargs["header"] = _members(app, tasks, parent, place)
        if kwargs["body"] is not None:
            kwargs["body"] = named(app, kwargs["body"], parent, f"{place}.body", own=own)
    else:
        signature.options["task_id"] = child_id(parent, place)
    return signature


def _members(app: Celery, tasks: Any, parent: str, place: str) -> list[Any]:
    return [named(app, task, parent, f"{place}.{index}") for index, task in enumerate(tasks)]


def _name_list(app: Celery, options: dict[str, Any], option: str, parent: str) -> None:
    found = maybe_list(options.get(option))
    if found:
        options[option] = [
            named(app, signature, parent, f"{option}.{index}")
            for index, signature in enumerate(found)
        ]


def _name_errbacks_of_chord(app: Celery, request: Context) -> None:
    """Whichever member ends last sends them, and it may not be the one that failed."""
    body: Any = request.chord
    if not body:
        return
    tasks = body["kwargs"]["tasks"] if body.get("subtask_type") == "group" else []
    for signature in (body, *tasks):
        options = signature["options"]
        # The body has an id before its chord's header is sent.
        _name_list(app, options, "link_error", str(options.get("task_id")))
