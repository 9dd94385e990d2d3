"""Flows: what a lock does, written once for threads and coroutines.

A flow is a generator that yields the calls which it needs: ``drive`` makes them on this thread and
``adrive`` awaits them. A flow owns nothing that must be released, so an interrupt may leave it at
any point.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, ParamSpec, TypeAlias, TypeVar

from .. import process
from ..backends.base import BaseLockBackend
from ..exceptions import ConnectionsBusy
from ..lease import Renewal, RenewalResult

P = ParamSpec("P")
T = TypeVar("T")

Call: TypeAlias = tuple[
    Callable[..., Any], Callable[..., Awaitable[Any]] | None, tuple[Any, ...], dict[str, Any]
]
"""A function that blocks; its counterpart for coroutines, ``None`` for the backend's ``acall`` of
the function; and the arguments."""
Flow: TypeAlias = Generator[Call, Any, T]


def call(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Flow[T]:
    """Call a method of the backend: ``answer = yield from call(backend.acquire, …)``.

    What it raises is raised here.
    """
    answer: T = yield method, None, args, kwargs
    return answer


def either(
    blocking: Callable[P, T], awaited: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> Flow[T]:
    """Call the first function on a thread, and await the second one in a coroutine."""
    answer: T = yield blocking, awaited, args, kwargs
    return answer


def pause(seconds: float) -> Flow[None]:
    yield time.sleep, asyncio.sleep, (seconds,), {}


def in_turn(attempt: Callable[[], Flow[T]]) -> Flow[T]:
    """Wait for a connection of this process for as long as the store answers others.

    Args:
        attempt: Makes the flow of one attempt, with a deadline of its own.

    Raises:
        BackendUnavailable: The store does not answer.
    """
    while True:
        try:
            return (yield from attempt())
        except ConnectionsBusy:
            pass


def renew_flow(backend: BaseLockBackend, renewal: Renewal) -> Flow[RenewalResult]:
    """Renew one lease; see ``in_turn``."""
    renewals, me = [renewal], process.current().id
    (result,) = yield from in_turn(
        lambda: call(backend.renew, renewals, process=me, deadline=backend.call_deadline())
    )
    return result


def drive(flow: Flow[T]) -> T:
    """Make the flow's calls on this thread, and return its result."""
    try:
        blocking, _, args, kwargs = next(flow)
        while True:
            try:
                answer = blocking(*args, **kwargs)
            except BaseException as error:
                blocking, _, args, kwargs = flow.throw(error)
            else:
                blocking, _, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def adrive(flow: Flow[T], backend: BaseLockBackend) -> T:
    """Like ``drive``, but awaits each call."""
    try:
        method, awaited, args, kwargs = next(flow)
        while True:
            try:
                if awaited is None:
                    answer = await backend.acall(method, *args, **kwargs)
                else:
                    answer = await awaited(*args, **kwargs)
            except BaseException as error:
                method, awaited, args, kwargs = flow.throw(error)
            else:
                method, awaited, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
