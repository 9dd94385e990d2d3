"""The lock of ``if_unavailable="local"``: better than none while the backend is away."""

from __future__ import annotations

import functools
import logging
import secrets

from .. import clock
from ..backends.base import AliasOptions
from ..backends.local import LocalBackend
from ..lease import Contention, LeaseRequest
from ..lock import Lock

__all__ = ["LocalHold", "acquire"]

logger = logging.getLogger("django_dlock")


@functools.cache
def _backend() -> LocalBackend:
    return LocalBackend(AliasOptions(alias="", backend=""))


class LocalHold:
    """A name that this process keeps to itself; has of ``Lock`` what a delivery needs.

    Attributes:
        token: ``None``: a number of this process alone would fence nothing.
    """

    token = None

    def __init__(self, alias: str, name: str, owner: str) -> None:
        self.alias, self.name, self.owner = alias, name, owner

    def release(self) -> None:
        _backend().release(self.name, self.owner, min_hold=0.0, deadline=clock.now())


def acquire(lock: Lock, ttl: float) -> LocalHold | Contention:
    """Hold the lock's name within this process, for ``ttl`` seconds at the most."""
    request = LeaseRequest(f"{lock.alias}:{lock.name}", secrets.token_hex(16), ttl)
    answer = _backend().acquire(request, deadline=clock.now())
    if isinstance(answer, Contention):
        return answer
    logger.warning(
        "Lock %r (alias %r) cannot be reached: it is held in this process alone",
        lock.name,
        lock.alias,
    )
    return LocalHold(lock.alias, request.name, request.owner)
