"""What a ``Lock`` does while its backend does not answer: ``if_unavailable``.

For ``local``, each backend has one replacement in this process, shared by locks and tasks. The
watchdog renews its leases like all others; the backend itself never learns of them.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from .. import clock, process
from ..backends.base import BaseLockBackend
from ..exceptions import BackendRefused, BackendUnavailable, LockNotAcquired
from ..lease import Lease, LeaseRequest
from ..log import logger
from .flow import Flow, pause
from .held_lease import registry

if TYPE_CHECKING:
    from ..backends.local import LocalBackend

PAUSE = 0.02
"""Seconds between two tries for a name that is locked in this process only."""

replacements: weakref.WeakKeyDictionary[BaseLockBackend, LocalBackend] = weakref.WeakKeyDictionary()
"""Backend → its replacement, if it was ever needed."""


def of(backend: BaseLockBackend) -> LocalBackend:
    """The replacement for a backend."""
    found = replacements.get(backend)
    if found is None:
        from ..backends.local import LocalBackend

        process.at_fork(after_in_child=_after_fork)
        made = LocalBackend(dataclasses.replace(backend.options, options={}))
        # One atomic step: two threads get the same one.
        found = replacements.setdefault(backend, made)
    return found


def _after_fork() -> None:
    # The parent's leases are not the child's.
    replacements.clear()


def apply_policy(policy: str, name: str, alias: str, error: BackendUnavailable) -> None:
    """Return if the name is to be locked in this process only.

    Raises:
        BackendUnavailable: The policy is ``raise``; or the backend refuses us, which no policy
            hides, because wrong settings stay wrong.
        LockNotAcquired: The policy is ``skip``.
    """
    if policy == "raise" or isinstance(error, BackendRefused):
        raise error
    if policy == "local":
        logger.warning(
            "Lock %r (alias %r): the backend does not answer, so the name is locked in this "
            "process only",
            name,
            alias,
            name=name,
            alias=alias,
            reason="unavailable",
        )
        return
    logger.warning(
        "Lock %r (alias %r): the backend does not answer, so the lock is not acquired",
        name,
        alias,
        name=name,
        alias=alias,
        reason="unavailable",
    )
    raise LockNotAcquired(
        "The backend does not answer, and if_unavailable is 'skip'", name, alias
    ) from error


def granted_before(backend: BaseLockBackend, name: str) -> bool:
    """Whether this process holds the name by a lease of the backend itself, which stays valid."""
    return any(held.name == name and held.active for held in registry.leases_of(backend))


def grant_flow(
    backend: BaseLockBackend, request: LeaseRequest, *, until: float
) -> Flow[Lease | None]:
    """A lease of the replacement; ``None`` if the name is taken until then.

    The calls do no I/O, so they are made at once, for coroutines, too.
    """
    while True:
        if not granted_before(backend, request.name):
            answer = of(backend).acquire(request, deadline=clock.now())
            if isinstance(answer, Lease):
                return answer
        if clock.now() >= until:
            return None
        yield from pause(PAUSE)
