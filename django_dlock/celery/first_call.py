"""A delivery runs its body once, however often a wrapper calls the task.

A class before ``LockedTask`` may have a ``__call__`` that tries ``super().__call__()`` again after
an error. The lock is released and the record is written by then, and the message may have been
published again. So a second call has the outcome of the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.app.task import Context

from ..log import logger
from .options import TaskWithOptions

KEY = "dlock_call"
"""Where it is kept in the attributes of the request."""


class FirstCall:
    """The first call of a task in one delivery, and how it ended.

    Attributes:
        running: Whether it has not ended yet; then another call is one that the body makes.
    """

    def __init__(self) -> None:
        self.running = True
        self._repeated = False
        self._value: Any = None
        self._error: BaseException | None = None

    @classmethod
    def of(cls, request: Context) -> FirstCall | None:
        """The first call of this delivery; ``None`` if there was none."""
        return vars(request).get(KEY)

    @classmethod
    def make(cls, request: Context, deliver: Callable[[], Any]) -> Any:
        """Make the first call of this delivery, and remember how it ended."""
        call = vars(request)[KEY] = cls()
        try:
            call._value = deliver()
        except BaseException as error:
            call._error = error
            raise
        finally:
            call.running = False
        return call._value

    def repeat(self, task: TaskWithOptions, wrapper: str) -> Any:
        """Return or raise what the first call did; the body does not run again.

        Args:
            wrapper: The class that makes the call, for the log.
        """
        if not self._repeated:
            self._repeated = True
            logger.warning(
                "Task %s[%s]: %s.__call__ has called the task a second time. A delivery runs its "
                "body once, so this call ends as the first one did. To run it again, use retry() "
                "or autoretry_for",
                task.name,
                task.request.id,
                wrapper,
                task_id=task.request.id,
            )
        if self._error is not None:
            raise self._error
        return self._value
