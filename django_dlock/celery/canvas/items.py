"""Items of ``map``, ``starmap`` and ``chunks``: Celery's own task calls ours for each item."""

from __future__ import annotations

from typing import Any

from celery import states

from ..options import TaskWithOptions
from .callbacks import child_id

BY = ("celery.map", "celery.starmap")


def is_item(task: TaskWithOptions | type[TaskWithOptions]) -> bool:
    """Whether the task is being called for an item of ``map`` or ``starmap``."""
    app: Any = task.app
    caller = app.current_task
    return caller is not None and caller.name in BY


def run(task: TaskWithOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the task for one item under its lock, as ``apply()`` does, and return its result.

    An item has no message that could be requeued. So under contention it waits, as with
    ``if_contended="wait"``, and an error also ends the remaining items.
    """
    caller: Any = task.app.current_task
    request = vars(caller.request)
    number = request["dlock_items"] = request.get("dlock_items", 0) + 1
    # If the message is redelivered, its items have the same ids again.
    task_id = child_id(str(caller.request.id), f"item.{number}")
    result: Any = task.apply(args, kwargs, task_id=task_id, throw=False)
    if result.state == states.REJECTED:
        raise result.result
    return result.get(disable_sync_subtasks=False)
