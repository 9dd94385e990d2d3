"""A streamed response that keeps the lock of its view; loaded with the first one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from django.http import HttpRequest

from ..exceptions import BackendUnavailable, LeaseLost
from ..lock import Lock
from ..log import logger
from .transactions import call_when_closed


def hold_until_closed(request: HttpRequest, response: object, lock: Lock) -> None:
    """Let a streamed response keep the lock.

    The server closes a response when it is sent or when the client has disconnected. A client that
    reads slowly, or not at all, decides when that is; so the caller limits the time.
    """
    # Another thread or task may send it.
    lock.unbind()
    # Response and request release when they are closed; only the first one has an effect.
    held = ExitStack()
    held.callback(_release, lock)
    closers: list[Callable[[], object]] = response._resource_closers  # type: ignore[attr-defined]
    closers.append(held.close)
    # A middleware may replace this response, as ConditionalGetMiddleware does with 304 (Not
    # Modified); then it is never closed. But the response that is sent closes its request.
    call_when_closed(request, held.close)


def _release(lock: Lock) -> None:
    try:
        lock.release()
    except (BackendUnavailable, LeaseLost) as error:
        # The response has been sent, so it can only be logged.
        logger.warning("After a streamed response: %s", error, about=lock)
