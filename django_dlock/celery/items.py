"""The items of ``map``, ``starmap`` and ``chunks``: calls of a task by a task of Celery's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import states

from .callbacks import child_id

if TYPE_CHECKING:
    from .task import LockedTask

__all__ = ["is_item", "run"]

BY = ("celery.map", "celery.starmap")


def is_item(task: LockedTask) -> bool:
    """Whether the task is being called for an item of ``map`` or ``starmap``."""
    caller = task.app.current_task
    return caller is not None and caller.name in BY


def run(task: LockedTask, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The task's result for one item, under its lock; as ``apply()`` does it.

    There is no message of the item's own to put back: under contention it waits as
    ``if_contended="wait"`` does, and what it raises ends the others, too.
    """
    caller: Any = task.app.current_task
    request = vars(caller.request)
    number = request["dlock_items"] = request.get("dlock_items", 0) + 1
    # An item of a message that is delivered again is the same one as before.
    task_id = child_id(str(caller.request.id), f"item.{number}")
    result: Any = task.apply(args, kwargs, task_id=task_id, throw=False)
    if result.state == states.REJECTED:
        raise result.result
    return result.get(disable_sync_subtasks=False)
