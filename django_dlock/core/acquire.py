"""How an acquire proceeds: try, judge the holder, wait, try again.

Written once, as a generator that yields the calls of the backend: ``drive`` makes them on this
thread and ``adrive`` awaits them. It owns nothing that must be released, so an interrupt may leave
it at any point.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from .. import clock
from ..backends.base import BaseLockBackend
from ..exceptions import BackendRefused, BackendUnavailable
from ..lease import Contention, Lease, LeaseRequest
from ..process import death_proof

__all__ = ["Flow", "adrive", "drive", "grant_flow"]

logger = logging.getLogger("django_dlock")

T = TypeVar("T")

Call: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method of a backend, or ``SLEEP``, its arguments and its keyword arguments."""
Flow: TypeAlias = Generator[Call, Any, T]
Met: TypeAlias = Callable[[Contention], None]

SLEEP = "sleep"
"""Pause for the seconds that are the argument."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.2
"""Seconds between two tries while the backend gives no answer."""


def grant_flow(
    backend: BaseLockBackend,
    request: LeaseRequest,
    *,
    patience: float | None,
    met: Met,
    broke: Met,
) -> Flow[Lease | None]:
    """Acquire within ``patience`` seconds, ``None`` for ever.

    Returns ``None`` when they are over. Also returns ``None``, earlier, if this request was granted
    and the lease has ended before we knew; the caller may go on with a new request.

    Args:
        met: Called with every contention.
        broke: Called with a contention whose lease was broken because its holder is dead.

    Raises:
        BackendUnavailable: No answer, for as long as patience and the alias's
            ``outage_patience`` allow. The caller must ``cancel_acquire`` the request.
    """
    now = clock.now()
    until = math.inf if patience is None else now + patience
    silent_since, failure = now, None

    def answered(contention: Contention) -> None:
        nonlocal silent_since, failure
        silent_since, failure = math.inf, None
        met(contention)

    while True:
        try:
            lease = yield from _until_granted(
                backend, request, until=until, met=answered, broke=broke
            )
        except BackendRefused:
            raise
        except BackendUnavailable as error:
            failure = error
        else:
            if lease is None and failure is not None:
                # An attempt that was not answered was granted, and its lease has ended.
                raise failure
            return lease
        now = clock.now()
        silent_since = min(silent_since, now)
        left = min(until, silent_since + backend.options.outage_patience) - now
        if left <= 0:
            raise failure
        yield SLEEP, (min(left, random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE)),), {}


def _until_granted(
    backend: BaseLockBackend,
    request: LeaseRequest,
    *,
    until: float,
    met: Met,
    broke: Met,
) -> Flow[Lease | None]:
    """Like ``grant_flow``, while the backend answers."""
    broken, waited, timeout = "", False, backend.command_timeout

    def is_dead(contention: Contention) -> bool:
        return contention.owner != broken and _holder_is_dead(contention)

    while True:
        now = clock.now()
        last = now >= until
        # The last attempt does not wait, so that the backend forgets this waiter.
        attempt = request._replace(waits=False) if last and request.waits else request
        answer = yield "acquire", (attempt,), {"deadline": min(now, until) + timeout}
        if isinstance(answer, Lease):
            return answer
        if not answer.owner:
            # This attempt was granted, and the lease ended before that was known here.
            return None
        met(answer)
        # Only after the first wait, because most holders release before it ends.
        if (last or waited) and is_dead(answer):
            broken = answer.owner
            logger.warning("Lock %r (alias %r): its holder is dead", request.name, backend.alias)
            if (yield "break_", (request.name,), {"owner": broken}):
                broke(answer)
        elif last:
            return None
        else:
            if not waited:
                request, waited = request._replace(since=now), True
            options = {
                "until": until,
                "interrupted": lambda met=answer: is_dead(met),
            }
            lease: Lease | None = yield "wait", (request, answer), options
            if lease is not None:
                return lease


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


def _holder_is_dead(met: Contention) -> bool:
    """Whether the holder's process is proven dead; costs no network call."""
    if met.kind != "held" or met.process is None:
        return False
    return met.proven_dead or death_proof(met.process) is not None
