"""Flows: what a lock does, written once for threads and coroutines.

A flow is a generator that yields the calls of the backend: ``drive`` makes them on this thread and
``adrive`` awaits them. A flow owns nothing that must be released, so an interrupt may leave it at
any point.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from ..backends.base import BaseLockBackend
from ..exceptions import ConnectionsBusy

__all__ = ["SLEEP", "Call", "Flow", "adrive", "drive", "in_turn"]

T = TypeVar("T")

Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method of a backend, or ``SLEEP``, its arguments and its keyword arguments."""
Flow: TypeAlias = Generator[Call, Any, T]

SLEEP = "sleep"
"""Pause; the argument is the number of seconds."""


def in_turn(backend: BaseLockBackend, method: str, *args: Any, **kwargs: Any) -> Flow[Any]:
    """A call that waits for a connection of this process for as long as the store answers others.

    Raises:
        BackendUnavailable: The store does not answer.
    """
    while True:
        try:
            return (yield method, args, {**kwargs, "deadline": backend.call_deadline()})
        except ConnectionsBusy:
            pass


def drive(flow: Flow[T], backend: BaseLockBackend) -> T:
    """Make the flow's calls on this thread, and return its result.

    What a call raises is raised in the flow.
    """
    try:
        method, args, kwargs = next(flow)
        while True:
            try:
                call = time.sleep if method is SLEEP else getattr(backend, method)
                answer = call(*args, **kwargs)
            except BaseException as error:
                method, args, kwargs = flow.throw(error)
            else:
                method, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def adrive(flow: Flow[T], backend: BaseLockBackend) -> T:
    """Like ``drive``, but awaits each call."""
    try:
        method, args, kwargs = next(flow)
        while True:
            try:
                if method is SLEEP:
                    await asyncio.sleep(*args)
                    answer = None
                elif method == "wait":
                    answer = await backend.async_wait(*args, **kwargs)
                else:
                    answer = await backend.acall(method, *args, **kwargs)
            except BaseException as error:
                method, args, kwargs = flow.throw(error)
            else:
                method, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
