"""The scope of the tenant in messages: written when one is published, and heeded while it runs.

A message carries the scope of the tenant who was active where it was published, whichever task it
is for, so that no link of a chain loses it. It counts from ``task_prerun`` to ``task_postrun``,
which is also when Celery publishes what follows a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ... import tenancy
from .header import HEADER, scope_of

_KEY = "dlock_scope"
"""In the facts of a request: what ends the scope of its message."""


def carry(headers: Any = None, **_: Any) -> None:
    """Receives ``before_task_publish``: write the scope, unless the message has one."""
    if tenancy.function is None or not isinstance(headers, dict):
        return
    found = headers.get(HEADER)
    header = found if isinstance(found, Mapping) else {}
    if not header.get("scope") and (scope := tenancy.current()):
        headers[HEADER] = {**header, "scope": scope}


def begin(task: Any = None, **_: Any) -> None:
    """Receives ``task_prerun``."""
    if tenancy.function is not None and (scope := scope_of(task.request.headers)):
        held = vars(task.request)[_KEY] = ExitStack()
        held.enter_context(tenancy.of_message(scope))


def end(task: Any = None, **_: Any) -> None:
    """Receives ``task_postrun``."""
    held = vars(task.request).pop(_KEY, None) if task is not None else None
    if held is not None:
        held.close()
