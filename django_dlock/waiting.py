"""How an acquire proceeds: try, stand in line, judge the holder, wait, try again.

The flow is written once, as a generator that yields what is to be done. ``drive`` does it for
threads and ``adrive`` for coroutines, so that both paths stay the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from . import clock
from .backends.base import BaseLockBackend
from .exceptions import BackendUnavailable
from .lease import Contention, Lease, LeaseRequest
from .process import death_proof
from .queueing import LOOK, Place

__all__ = ["Flow", "aacquire", "acquire", "acquisition", "adrive", "drive"]

logger = logging.getLogger("django_dlock")

T = TypeVar("T")

Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method of a backend, or ``SLEEP``, its arguments and its keyword arguments."""
Flow: TypeAlias = Generator[Call, Any, T]
Met: TypeAlias = Callable[[Contention], None]

SLEEP = "sleep"
"""Stand in the line of this process; the arguments are the place and seconds."""


def acquire(
    backend: BaseLockBackend,
    request: LeaseRequest,
    *,
    patience: float | None,
    met: Met,
    broke: Met,
) -> Lease | None:
    """Acquire within ``patience`` seconds, ``None`` for ever; answers ``None`` when it ends.

    Args:
        met: Told of every contention met.
        broke: Told of a lease that was broken because its holder is proven dead.

    Raises:
        BackendUnavailable: No answer; the caller must ``undo`` the request.
    """
    now = clock.now()
    until = math.inf if patience is None else now + patience
    place = Place(backend, request.name, now)
    # Twice the same: an interrupt may strike the first.
    try:
        try:
            contention = None
            # Whoever tries once asks past the line.
            if patience == 0 or place.line_up():
                place.asks = True
                answer = backend.acquire(request, deadline=now + backend.command_timeout)
                if isinstance(answer, Lease):
                    return answer
                contention = answer
            flow = acquisition(
                backend, request, place, contention, until=until, met=met, broke=broke
            )
            return drive(flow, backend)
        except BackendUnavailable:
            place.warn()
            raise
        finally:
            place.leave()
    except BaseException:
        place.leave()
        raise


async def aacquire(
    backend: BaseLockBackend,
    request: LeaseRequest,
    *,
    patience: float | None,
    met: Met,
    broke: Met,
    abandoned: Callable[[], bool],
) -> Lease | None:
    """As ``acquire``, for coroutines.

    Args:
        abandoned: The caller is gone; asked while waiting.
    """
    now = clock.now()
    until = math.inf if patience is None else now + patience
    place = Place(backend, request.name, now, asyncio.get_running_loop())
    try:
        try:
            contention = None
            if patience == 0 or place.line_up():
                place.asks = True
                answer: Lease | Contention = await backend.acall(
                    "acquire", request, deadline=now + backend.command_timeout
                )
                if isinstance(answer, Lease):
                    return answer
                contention = answer
            flow = acquisition(
                backend,
                request,
                place,
                contention,
                until=until,
                met=met,
                broke=broke,
                abandoned=abandoned,
            )
            return await adrive(flow, backend)
        except BackendUnavailable:
            place.warn()
            raise
        finally:
            place.leave()
    except BaseException:
        place.leave()
        raise


def drive(flow: Flow[T], backend: BaseLockBackend) -> T:
    """Carry out the flow's calls on this thread and give its result.

    A flow may be left where it stands, by an interrupt between two calls.
    """
    try:
        method, args, kwargs = next(flow)
        while True:
            try:
                if method is SLEEP:
                    place, seconds = args
                    answer = place.sleep(seconds)
                else:
                    answer = getattr(backend, method)(*args, **kwargs)
            except BaseException as error:
                method, args, kwargs = flow.throw(error)
            else:
                method, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def adrive(flow: Flow[T], backend: BaseLockBackend) -> T:
    """As ``drive``, awaiting each call; a cancellation reaches the flow as an exception."""
    try:
        method, args, kwargs = next(flow)
        while True:
            try:
                if method is SLEEP:
                    place, seconds = args
                    answer = await place.asleep(seconds)
                else:
                    answer = await backend.acall(method, *args, **kwargs)
            except BaseException as error:
                method, args, kwargs = flow.throw(error)
            else:
                method, args, kwargs = flow.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def acquisition(
    backend: BaseLockBackend,
    request: LeaseRequest,
    place: Place,
    answer: Contention | None,
    *,
    until: float,
    met: Met,
    broke: Met,
    abandoned: Callable[[], bool] = lambda: False,
) -> Flow[Lease | None]:
    """How it goes on after ``answer``, that of the first try; ``None`` where it is to stand in
    line first."""
    timeout = backend.command_timeout
    broken = suspect = ""
    waits = request.waits
    last = not waits
    while True:
        if answer is None:
            now = place.beat()
            last = now >= until
            if not (last or place.may_ask()):
                known = place.met_before()
                if known is not None:
                    met(known)
                yield SLEEP, (place, min(until - now, LOOK)), {}
                continue
            first, place.told = place.is_first(), False
            # One of a line is enough for the backend; and the last try no longer waits, so that
            # the backend forgets this waiter.
            waits = first and not last
            place.asks = place.asks or waits
            attempt = request if waits else request._replace(waits=False)
            answer = yield "acquire", (attempt,), {"deadline": min(now, until) + timeout}
            if isinstance(answer, Lease):
                return answer
        met(answer)
        if not answer.owner:
            # What it was handed has been broken before it heard of it, and is not to be revived.
            return None
        place.contention = answer
        # One who waits looks while it waits: most holders release before that.
        looks = not waits or answer.owner == suspect
        if looks and answer.owner != broken and _holder_is_dead(answer):
            broken = answer.owner
            logger.warning("Lock %r (alias %r): its holder is dead", request.name, backend.alias)
            if (yield "break_", (request.name,), {"owner": answer.owner, "reason": "holder_dead"}):
                broke(answer)
        elif last:
            return None
        elif waits:

            def interrupted(
                met: Contention = answer, judged: bool = answer.owner == broken
            ) -> bool:
                nonlocal suspect
                place.prove_life()
                if not judged and _holder_is_dead(met):
                    suspect = met.owner
                return abandoned() or suspect == met.owner

            lease = yield (
                "wait",
                (request, answer),
                {"until": until, "deadline": until + timeout, "interrupted": interrupted},
            )
            if lease is not None:
                return lease  # type: ignore[no-any-return]
        answer = None


def _holder_is_dead(met: Contention) -> bool:
    """Whether the holder's process is proven dead from here; costs no network call."""
    if met.kind != "held" or met.process is None:
        return False
    return death_proof(met.process) is not None
