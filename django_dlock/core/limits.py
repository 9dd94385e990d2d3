"""Cuts a lease short when the ``max_hold`` of one of its holds ends before what was granted."""

from __future__ import annotations

from .. import clock
from ..backends.base import BaseLockBackend
from ..exceptions import BackendUnavailable
from ..log import logger
from . import watchdog
from .flow import Flow, renew_flow
from .held_lease import HeldLease


def limit_flow(held: HeldLease, backend: BaseLockBackend) -> Flow[None]:
    """Let the lease end with the first ``max_hold`` of its holds, in the store, too.

    Never raises because of the backend: if it does not answer, the lease ends on time for this
    process, and in the store with its TTL.
    """
    end, now = held.first_end(), clock.now()
    if end >= held.max_end:
        return
    cut = held.end_at(end, now)
    # It may end before the watchdog next wakes.
    watchdog.watch(held)
    # A name that is locked in this process only ends with its own deadline.
    if cut is None or held.backend is not backend:
        return
    try:
        result = yield from renew_flow(backend, cut)
    except BackendUnavailable as error:
        logger.warning("It ends in the store with its TTL: %s", error, about=held)
        return
    if result.outcome == "renewed":
        held.confirm(now, result.ttl, clock.now())
    elif result.outcome != "unanswered":
        held.lose_by_outcome(result.outcome)
