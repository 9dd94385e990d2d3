"""The names of the arguments of tasks."""

from __future__ import annotations

import inspect

from celery.app import app_or_default

from .options import TaskWithOptions


def names_of_arguments() -> set[str]:
    """Of all tasks with locks that the current app knows."""
    app = app_or_default()
    app.loader.import_default_modules()
    found: set[str] = set()
    for task in app.tasks.values():
        if isinstance(task, TaskWithOptions):
            found.update(inspect.signature(task.run).parameters)
    return found
