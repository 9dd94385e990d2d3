"""Results of functions that have not run yet, such as coroutines: a lock around the call guards
nothing of what they will do."""

from __future__ import annotations

import asyncio
import inspect


def refuse_unfinished(result: object, what: str, cure: str) -> None:
    """Raise if somebody else would have to run the result: a coroutine, a task, a generator.

    A coroutine or generator is closed, and a task is cancelled, so that it does not run unguarded.

    Args:
        what: Whose result it is, at the beginning of the message.

    Raises:
        TypeError: It is one of these.
    """
    # First the cheap question, for what nearly all functions return.
    if result is None or isinstance(result, str | int | list | dict):
        return
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        # Without this, Python warns that a coroutine was never awaited.
        result.close()
    elif isinstance(result, asyncio.Future):
        result.cancel()
    elif not inspect.isawaitable(result) and not inspect.isasyncgen(result):
        return
    raise TypeError(f"{what} returned a {type(result).__name__}, which has not run yet: {cure}")
