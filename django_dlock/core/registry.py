"""Which leases this process holds, by the thread, task or handle that holds each of them."""

from __future__ import annotations

import asyncio
import threading
from itertools import islice
from typing import Generic, Protocol, TypeAlias, TypeVar

from ..backends.base import BaseLockBackend
from ..process import thread_exists

HolderKey: TypeAlias = object
"""The holder: a ``threading.Thread``, an ``asyncio.Task``, or an object that stands for the handle.

The objects themselves and not their ids, because a later thread or task may get the same id.
"""

MOST_TOLD = 8
"""The most leases of its caller that a request names; a deadlock rarely needs more than two."""


class Held(Protocol):
    """What the registry asks of a ``HeldLease``."""

    backend: BaseLockBackend
    name: str
    owner: str
    key: HolderKey
    known_as: HolderKey

    @property
    def active(self) -> bool: ...

    @property
    def collected(self) -> bool: ...

    @property
    def ended(self) -> bool: ...


H = TypeVar("H", bound=Held)


def holder_ended(key: HolderKey) -> bool:
    """Whether the thread or task has ended; an object that stands for a handle never ends."""
    if isinstance(key, asyncio.Future):
        # A closed event loop never runs its tasks again, even unfinished ones.
        return key.done() or key.get_loop().is_closed()
    if isinstance(key, threading._DummyThread):
        # A greenlet of gevent, which is no ``Thread``, is taken off this list when it ends. So is a
        # thread that Python did not start, in some versions; in others, ask the system.
        if key not in threading.enumerate():
            return True
        exists = thread_exists(key.native_id or 0)
        if exists is not None:
            return not exists
    return isinstance(key, threading.Thread) and not key.is_alive()


class HolderRegistry(Generic[H]):
    """All held leases of this process, by backend, name and holder.

    Not by alias, which names another backend once the settings have changed.
    """

    def __init__(self) -> None:
        self._leases: dict[tuple[BaseLockBackend, str, HolderKey], H] = {}
        # Holder → its leases by owner, the latest last.
        self._by_holder: dict[HolderKey, dict[str, H]] = {}

    def __bool__(self) -> bool:
        """Whether this process holds any lease; the cheapest check."""
        return bool(self._by_holder)

    def find(self, backend: BaseLockBackend, name: str, key: HolderKey) -> H | None:
        """The lease of this holder, unless it has ended or its ``Lock`` was collected."""
        held = self._leases.get((backend, name, key))
        if held is None or not held.active or held.collected:
            return None
        return held

    def owners_of(self, *holders: HolderKey) -> list[str]:
        """The owners of the last ``MOST_TOLD`` leases of each of these holders."""
        owners: list[str] = []
        for holder in holders:
            leases = self._by_holder.get(holder)
            if not leases:
                continue
            try:
                latest = list(islice(reversed(leases.values()), MOST_TOLD))
            except RuntimeError:
                # Another thread has just ended one of them.
                latest = list(leases.copy().values())[-MOST_TOLD:]
            owners += [held.owner for held in latest if not held.ended]
        return owners

    def add(self, held: H) -> None:
        self._add(held, held.key)
        if held.known_as is not None:
            self._add(held, held.known_as)

    def _add(self, held: H, key: HolderKey) -> None:
        self._leases[held.backend, held.name, key] = held
        self._by_holder.setdefault(key, {})[held.owner] = held

    def discard(self, held: H) -> None:
        self._discard(held, held.key)
        if held.known_as is not None:
            self._discard(held, held.known_as)

    def _discard(self, held: H, key: HolderKey) -> None:
        place = (held.backend, held.name, key)
        if self._leases.get(place) is held:
            self._leases.pop(place, None)
        leases = self._by_holder.get(key)
        if leases is None:
            return
        leases.pop(held.owner, None)
        if not leases:
            self._by_holder.pop(key, None)
            if leases:
                # Another thread has just added one.
                self._by_holder.setdefault(key, leases)

    def leases_of(self, backend: BaseLockBackend) -> list[H]:
        """The held leases of one backend, each once."""
        found = {id(held): held for held in list(self._leases.values()) if held.backend is backend}
        return list(found.values())

    def take_all(self) -> list[H]:
        """All held leases; empties the registry."""
        leases, self._leases, self._by_holder = self._leases, {}, {}
        return list(leases.values())
