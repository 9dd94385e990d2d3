"""The release of a lock that outlives its view: with its response, or with its request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from django.http import HttpRequest

from ..exceptions import BackendUnavailable, LeaseLost
from ..lock import Lock
from ..log import logger

__all__ = ["hold_until_closed", "release_when_closed"]


def hold_until_closed(request: HttpRequest, response: object, lock: Lock) -> bool:
    """Let a streamed response keep the lock; returns ``False`` for other responses.

    The server closes a response when it is sent or when the client has disconnected. A client that
    reads slowly, or not at all, decides when that is; so the caller limits the time.
    """
    if not getattr(response, "streaming", False):
        return False
    # Another thread or task may send it.
    lock.unbind()
    # Response and request release when they are closed; only the first one has an effect.
    held = ExitStack()
    held.callback(_release, lock)
    closers: list[Callable[[], object]] = response._resource_closers  # type: ignore[attr-defined]
    closers.append(held.close)
    # A middleware may replace this response, as ConditionalGetMiddleware does with 304 (Not
    # Modified); then it is never closed. But the response that is sent closes its request.
    _call_when_closed(request, held.close)
    return True


def release_when_closed(request: HttpRequest, lock: Lock) -> None:
    """Release with the request, at the latest, a lock that waits for the end of a transaction.

    After a function of ``on_commit`` has raised, Django calls no other, and in a ``TestCase`` it
    calls none.
    """
    late_release = getattr(lock, "_late_release", lambda: None)

    def release() -> None:
        if late := late_release():
            late.run()

    if late_release():
        _call_when_closed(request, release)


def _call_when_closed(request: HttpRequest, function: Callable[[], object]) -> None:
    # REST framework passes its views a wrapper around Django's request.
    whole: HttpRequest = getattr(request, "_request", request)
    closing = ExitStack()
    closing.callback(whole.close)
    closing.callback(function)
    whole.close = closing.close  # type: ignore[method-assign]


def _release(lock: Lock) -> None:
    try:
        lock.release()
    except (BackendUnavailable, LeaseLost) as error:
        # The response has been sent, so it can only be logged.
        logger.warning("After a streamed response: %s", error, about=lock)
