"""``if_unavailable="local"``: a lock in this process only, while the backend is unreachable."""

from __future__ import annotations

import functools
import logging
import secrets
from dataclasses import dataclass

from ... import clock
from ...backends.base import AliasOptions
from ...backends.local import LocalBackend
from ...lease import Contention, LeaseRequest
from ...lock import Lock

__all__ = ["LocalGuard", "acquire"]

logger = logging.getLogger("django_dlock")


@functools.cache
def _backend() -> LocalBackend:
    return LocalBackend(AliasOptions(alias="", backend=""))


@dataclass(frozen=True)
class LocalGuard:
    """A name locked in this process only, or no lock at all; with the attributes of a ``Lock``.

    Attributes:
        owner: ``None`` for a task without a lock.
        token: ``None``: a number that only this process knows would fence nothing.
    """

    alias: str = ""
    name: str = ""
    owner: str | None = None
    token: None = None

    def release(self) -> None:
        if self.owner is not None:
            _backend().release(self.name, self.owner, min_hold=0.0, deadline=clock.now())


def acquire(lock: Lock, ttl: float) -> LocalGuard | Contention:
    """Lock the name within this process, for at most ``ttl`` seconds."""
    request = LeaseRequest(f"{lock.alias}:{lock.name}", secrets.token_hex(16), ttl)
    answer = _backend().acquire(request, deadline=clock.now())
    if isinstance(answer, Contention):
        return answer
    logger.warning(
        "Lock %r (alias %r): the backend does not answer, so the name is locked in this process "
        "only",
        lock.name,
        lock.alias,
    )
    return LocalGuard(lock.alias, request.name, request.owner)
