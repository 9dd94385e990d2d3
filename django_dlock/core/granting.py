"""How a backend grants a lease: try, wait, break the lease of a dead holder, try again.

Written as flows; see ``flow``. Which handle asks, and who is told, is in ``acquire``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from .. import clock
from ..backends.base import BaseLockBackend
from ..exceptions import BackendRefused, BackendUnavailable, ConnectionsBusy
from ..lease import Contention, Lease, LeaseRequest
from ..log import logger
from ..process import death_proof
from .flow import Flow, call, either, pause

Met: TypeAlias = Callable[[Contention], None]
Broke: TypeAlias = Callable[[str, Contention], None]

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.2
"""Seconds between two tries while the backend gives no answer."""


def grant_flow(
    backend: BaseLockBackend,
    request: LeaseRequest,
    *,
    patience: float | None,
    met: Met,
    broke: Broke,
) -> Flow[Lease | None]:
    """Acquire within ``patience`` seconds, ``None`` for ever.

    Returns ``None`` when that time is over; or earlier, if this request was granted and the lease
    ended before this process knew. In that case the caller may go on with a new request.

    Args:
        met: Called with every contention.
        broke: Called with the name, and a contention whose lease was broken because its holder
            is dead.

    Raises:
        ConnectionsBusy: The patience ended before a connection of this process was free.
        BackendUnavailable: No answer, for as long as patience and the alias's
            ``outage_patience`` allow. The caller must ``cancel_acquire`` the request, unless the
            error says that it was never sent.
    """
    now = clock.now()
    until = math.inf if patience is None else now + patience
    silent_since, failure, in_doubt = now, None, False

    def answered(contention: Contention) -> None:
        nonlocal silent_since, failure, in_doubt
        # It may be in the queue of the store, which will grant it the name later.
        silent_since, failure, in_doubt = math.inf, None, True
        met(contention)

    while True:
        try:
            lease = yield from _until_granted(
                backend, request, until=until, met=answered, broke=broke
            )
        except ConnectionsBusy as busy:
            # The store answers others: waiting for a connection is waiting, and no outage.
            busy.unsent = not in_doubt
            silent_since = math.inf
            if clock.now() >= until:
                raise
            continue
        except BackendUnavailable as error:
            in_doubt = in_doubt or not error.unsent
            error.unsent = not in_doubt
            if isinstance(error, BackendRefused):
                raise
            failure = error
        else:
            if lease is None and failure is not None and clock.now() >= until:
                # An attempt that was not answered was granted, and its lease has ended. While
                # there is time left, the caller goes on with a new request.
                raise failure
            return lease
        now = clock.now()
        silent_since = min(silent_since, now)
        left = min(until, silent_since + backend.options.outage_patience) - now
        if left <= 0:
            raise failure
        yield from pause(min(left, random.uniform(SHORTEST_PAUSE, LONGEST_PAUSE)))


def _until_granted(
    backend: BaseLockBackend,
    request: LeaseRequest,
    *,
    until: float,
    met: Met,
    broke: Broke,
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
        deadline = min(now, until) + timeout
        answer = yield from call(backend.acquire, attempt, deadline=deadline)
        if isinstance(answer, Lease):
            return answer
        if not answer.owner:
            # This attempt was granted, and the lease ended before that was known here.
            return None
        met(answer)
        # Only after the first wait, because most holders release before it ends.
        if (last or waited) and is_dead(answer):
            broken = answer.owner
            logger.warning(
                "Lock %r (alias %r): its holder is dead",
                request.name,
                backend.alias,
                name=request.name,
                alias=backend.alias,
                owner=broken,
                reason="holder_dead",
            )
            end = min(clock.now(), until) + timeout
            if (yield from call(backend.break_silently, request.name, owner=broken, deadline=end)):
                broke(request.name, answer)
        elif last:
            return None
        else:
            if not waited:
                request, waited = request._replace(since=now), True
            lease = yield from either(
                backend.wait,
                backend.async_wait,
                request,
                answer,
                until=until,
                interrupted=partial(is_dead, answer),
            )
            if lease is not None:
                return lease


def _holder_is_dead(contention: Contention) -> bool:
    """Whether the holder's process is proven dead; costs no network call."""
    if contention.kind != "held" or contention.process is None:
        return False
    return contention.proven_dead or death_proof(contention.process) is not None
