"""How an acquire proceeds: try, judge the holder, wait, try again.

The flow is written once, as a generator that yields backend calls. ``drive`` carries them out
for threads and ``adrive`` for coroutines, so that both paths stay the same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from . import clock
from .backends.base import BaseLockBackend
from .lease import Contention, Lease, LeaseRequest
from .process import death_proof

__all__ = ["Flow", "acquisition", "adrive", "drive"]

logger = logging.getLogger("django_dlock")

T = TypeVar("T")

Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method of a backend, its arguments and its keyword arguments."""
Flow: TypeAlias = Generator[Call, Any, T]


def drive(flow: Flow[T], backend: BaseLockBackend) -> T:
    """Carry out the flow's calls on this thread and give its result."""
    try:
        method, args, kwargs = next(flow)
        while True:
            try:
                answer = getattr(backend, method)(*args, **kwargs)
            except BaseException as error:
                method, args, kwargs = flow.throw(error)
            else:
                method, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        # An interrupt between two calls: the flow must hear of it now, and not when its last
        # reference, in a traceback perhaps, is gone.
        flow.close()


async def adrive(flow: Flow[T], backend: BaseLockBackend) -> T:
    """As ``drive``, awaiting each call; a cancellation reaches the flow as an exception."""
    try:
        method, args, kwargs = next(flow)
        while True:
            try:
                answer = await backend.acall(method, *args, **kwargs)
            except BaseException as error:
                method, args, kwargs = flow.throw(error)
            else:
                method, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()


def acquisition(
    backend: BaseLockBackend,
    request: LeaseRequest,
    *,
    patience: float | None,
    met: Callable[[Contention], None],
    broke: Callable[[Contention], None],
    abandoned: Callable[[], bool],
) -> Flow[Lease | None]:
    """Acquire within ``patience`` seconds, ``None`` for ever; answers ``None`` when it ends.

    Args:
        met: Told of every contention met.
        broke: Told of a lease that was broken because its holder is proven dead.
        abandoned: The caller is gone; asked while waiting.

    Raises:
        BackendUnavailable: No answer; the caller must ``undo`` the request.
    """
    timeout = backend.command_timeout
    until = math.inf if patience is None else clock.now() + patience
    broken = ""
    while True:
        now = clock.now()
        # The last try no longer waits, so that the backend forgets this waiter.
        last = now >= until
        attempt = dataclasses.replace(request, waits=False) if last and request.waits else request
        answer = yield "acquire", (attempt,), {"deadline": min(now, until) + timeout}
        if isinstance(answer, Lease):
            return answer
        met(answer)
        if answer.owner != broken and _holder_is_dead(answer):
            broken = answer.owner
            logger.warning("Lock %r (alias %r): its holder is dead", request.name, backend.alias)
            if (yield "break_", (request.name,), {"owner": answer.owner, "reason": "holder_dead"}):
                broke(answer)
            continue
        if last or until <= now:
            return None

        def interrupted(met: Contention = answer, judged: bool = answer.owner == broken) -> bool:
            return abandoned() or (not judged and _holder_is_dead(met))

        lease = yield (
            "wait",
            (request, answer),
            {"until": until, "deadline": until + timeout, "interrupted": interrupted},
        )
        if lease is not None:
            return lease  # type: ignore[no-any-return]


def _holder_is_dead(met: Contention) -> bool:
    """Whether the holder's process is proven dead from here; costs no network call."""
    if met.kind != "held" or met.process is None:
        return False
    return death_proof(met.process) is not None
