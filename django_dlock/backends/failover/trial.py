"""Finds out whether a store grants leases, by doing what every client does there.

A store that only answers is of no use: its memory or its disk may be full, it may be a replica by
now, and its user may lack the rights on the keys of an epoch.
"""

from __future__ import annotations

import secrets
import time
from weakref import WeakKeyDictionary

from ... import clock, process
from ...exceptions import BackendRefused, BackendUnavailable, ConnectionsBusy
from ...lease import Contention, LeaseRequest, Renewal
from ..base import BaseLockBackend
from .terms import TOKEN_BITS

PROBE = "django_dlock:probe"
"""The name that is acquired; nobody waits for it."""
LONGEST = 3.0
"""Seconds for which its lease lasts if the process ends before it is released."""
PAUSE = 0.2
_unfinished: WeakKeyDictionary[BaseLockBackend, LeaseRequest] = WeakKeyDictionary()
"""Tries that may have left a lease behind."""


class BeingTried(BackendUnavailable):
    """The lease of another process's try is there, or what it has left behind: it tells nothing."""


UNDECIDED = (BeingTried, ConnectionsBusy)
"""What does not tell whether the store grants."""


def try_store(store: BaseLockBackend, deadline: float) -> None:
    """Acquire a lease, renew it and release it.

    Raises:
        BackendUnavailable: The store gives no answer, refuses, or does not keep what it grants;
            one of ``UNDECIDED`` if that is not known.
    """
    if (left_behind := _unfinished.get(store)) is not None:
        # Some stores would keep it for as long as this process lives.
        store.cancel_acquire(left_behind, deadline=deadline)
    ttl = min(LONGEST, store.max_ttl)
    request = LeaseRequest(PROBE, secrets.token_hex(16), ttl)
    _unfinished[store] = request
    answer = store.acquire(request, deadline=deadline)
    if isinstance(answer, Contention):
        _unfinished.pop(store, None)
        raise BeingTried("The store is being tried by another process", PROBE, store.alias)
    check_token(answer.token, PROBE, store.alias)
    renewal = Renewal(PROBE, answer.owner, ttl)
    (renewed,) = store.renew([renewal], process=process.current().id, deadline=deadline)
    released = store.release(PROBE, answer.owner, min_hold=0.0, deadline=deadline)
    _unfinished.pop(store, None)
    for done, wanted in ((renewed.outcome, "renewed"), (released, "released")):
        # Another process that tries the store may have taken a lease over that was granted late.
        if done != wanted and clock.now() < answer.deadline:
            raise BackendUnavailable(f"A lease was granted, and then {done}", PROBE, store.alias)


def try_patiently(store: BaseLockBackend) -> None:
    """The same, again and again while it is not known."""
    until = clock.now() + 2 * LONGEST
    while True:
        try:
            return try_store(store, store.call_deadline())
        except UNDECIDED:
            if clock.now() >= until:
                raise
        time.sleep(PAUSE)


def refusal_of(store: BaseLockBackend, deadline: float) -> BackendUnavailable | None:
    """Why the store does not grant; ``None`` if it does."""
    try:
        try_store(store, deadline)
    except BackendUnavailable as error:
        return error
    return None


def check_token(token: int, name: str, alias: str, store: str = "") -> None:
    """Refuse a token in front of which there is no room for the epoch.

    Raises:
        BackendRefused: Fail-over cannot use the store.
    """
    if token >> TOKEN_BITS:
        raise BackendRefused(
            f"The store {store or alias!r} gave the fencing token {token}, which is too large for "
            f"fail-over: it must be less than 2 to the power of {TOKEN_BITS}",
            name,
            alias,
        )
