"""The work of an asynchronous view, which goes on when its client has gone; loaded with the first.

Under ASGI, Django cancels the task of a request when its client disconnects. That stops a coroutine
where it waits, but neither a thread that it waits for nor what it has done so far.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, cast

from django.http import HttpResponseBase, StreamingHttpResponse

from ..lock import Lock
from ..log import logger

Response: TypeAlias = HttpResponseBase
Begin: TypeAlias = Callable[[], None]
"""Called by the work when it has its lock: from then on it is finished, whoever goes away."""

_running: dict[asyncio.Task[Any], asyncio.Task[Any] | None] = {}
"""The tasks of works, and those that wait for them.

Also keeps them alive: an event loop has only weak references to tasks that wait.
"""
_kept: list[Lock] = []


async def finish(work: Callable[[Begin], Awaitable[Response]], lock: Lock) -> Response:
    """Await ``work(begin)`` in a task of its own, with the context of this one.

    A cancellation that comes before ``begin`` is called ends the work. A later one is dropped, as
    the disconnect of a client is without ASGI: Django keeps the request's thread, its connections
    and its middleware until the work is done, and gets its response or exception as usual.

    Args:
        lock: The one that the work takes, for the log.
    """
    waiting = asyncio.current_task()
    if waiting in _running:
        # Another guarded view, which calls this one, has its lock already.
        return await work(_already_begun)
    run = _Run(waiting)
    task = asyncio.create_task(run.call(work))
    dropped = 0
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # noqa: PERF203 - each is another one
            dropped += 1
            if not run.begun:
                task.cancel()
        except BaseException:
            # The event loop has given up the request, so nobody gets the outcome.
            task.add_done_callback(partial(_log_failure, lock))
            raise
    run.adopt_context()
    if dropped and not task.cancelled():
        _forget_cancellations(waiting, dropped)
        response = task.result()
        if getattr(response, "streaming", False):
            # It may have no end. Django closes what it is made from with the response.
            cast("StreamingHttpResponse", response).streaming_content = _nothing()
    return task.result()


def is_cut_short() -> bool:
    """Whether a ``CancelledError`` in the work comes from the end of the event loop.

    That cancels the task of the request as well, while a view may cancel only itself. Before Python
    3.11, this cannot be told.
    """
    task = asyncio.current_task()
    if task not in _running:
        return False
    return all(getattr(each, "cancelling", int)() for each in (task, _running[task]))


def keep_until_exit(lock: Lock) -> None:
    """Hold the lock until this process ends, as long as threads of cancelled work may go on."""
    lock.unbind()
    _kept.append(lock)


class _Run:
    """What becomes of one call of the work.

    Attributes:
        begun: Whether the work has its lock.
    """

    def __init__(self, waiting: asyncio.Task[Any] | None) -> None:
        self.begun = False
        self._waiting = waiting
        self._context: contextvars.Context | None = None

    async def call(self, work: Callable[[Begin], Awaitable[Response]]) -> Response:
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        _running[task] = self._waiting
        try:
            return await work(self._begin)
        finally:
            del _running[task]
            self._context = contextvars.copy_context()

    def _begin(self) -> None:
        self.begun = True

    def adopt_context(self) -> None:
        """Make changes of context variables by the work visible to the caller, as an ``await``."""
        for variable, value in (self._context or {}).items():
            if variable.get(self) is not value:
                variable.set(value)


def _already_begun() -> None:
    pass


def _forget_cancellations(task: Any, count: int) -> None:
    """Say that they were dropped, so that a timeout around the view can tell (Python 3.11)."""
    for _ in range(count if hasattr(task, "uncancel") else 0):
        task.uncancel()


def _log_failure(lock: Lock, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        logger.error("A view failed after its client had gone", exc_info=error, about=lock)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield
