"""The leases that one ``Lock`` holds.

Usually there is one at most. A handle may be shared, as a module-level ``threading.Lock`` is:
then each thread or task has its own, and one that lost its lease must not use another's instead.
"""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
import warnings
from typing import TypeAlias

from .. import process
from . import dispatch, watchdog
from .held_lease import HeldLease, registry
from .registry import HolderKey, holder_ended

__all__ = ["Caller", "HandleLeases"]


Caller: TypeAlias = tuple[HolderKey, HolderKey, HolderKey]
"""Who acquires: the future holder; another key under which the registry will find the lease; and
a key whose lease the caller must not wait for, because it would wait for itself."""


class HandleLeases:
    """Held leases by owner. If an interrupt cuts a method short, a second call completes it."""

    __slots__ = ("_bound", "_leases", "_mark", "ended")

    def __init__(self, bound: bool) -> None:
        self._bound = bound
        self._mark = object()
        self._leases: dict[str, HeldLease] = {}
        self.ended: HeldLease | None = None
        """The last lease that was lost, so that the ``Lock`` can say what happened."""

    def mine(self) -> HeldLease | None:
        """The caller's lease; else the only or latest one, because any thread may release.

        If none is left, the last one that was lost.
        """
        process.notice_fork()
        if not self._leases:
            return self.ended
        # A copy is one atomic step; another thread may change the dict meanwhile.
        leases = self._leases.copy()
        latest = next(reversed(leases.values()), self.ended)
        if len(leases) > 1:
            keys = self._keys_of_caller()
            mine = [held for held in leases.values() if held.key in keys]
            # The latest name, because the caller may hold those of several tenants. Of that, the
            # first lease: who has lost it must not use that of the next holder on its thread.
            return next((held for held in mine if held.name == mine[-1].name), latest)
        return latest

    def current(self) -> HeldLease | None:
        """Like ``mine``, but ``None`` if the lease was lost."""
        held = self.mine()
        return None if held is self.ended else held

    # -- who acquires ------------------------------------------------------------------

    def caller_thread(self) -> Caller:
        """The caller of a synchronous acquire."""
        return threading.current_thread() if self._bound else self._mark, None, None

    def caller_task(self) -> Caller:
        """The caller of ``async with``."""
        task = asyncio.current_task() if self._bound else None
        return (self._mark, None, None) if task is None else (task, None, (task,))

    def caller_handle(self) -> Caller:
        """The caller of ``aacquire``: the ``Lock`` holds, but its task must not wait for itself."""
        task = asyncio.current_task() if self._bound else None
        return self._mark, task and (task,), task

    def _keys_of_caller(self) -> tuple[HolderKey, ...]:
        if not self._bound:
            return (self._mark,)
        try:
            return asyncio.current_task() or self._mark, threading.current_thread()
        except RuntimeError:
            # No event loop runs here.
            return (threading.current_thread(),)

    # -- adding and dropping -----------------------------------------------------------

    def add(self, held: HeldLease) -> None:
        """Add a new lease to this handle, the registry and the watchdog."""
        if self._leases:
            self._prune()
        self.ended = None
        self.enter(held, held.owner)
        registry.add(held)
        watchdog.watch(held)

    def enter(self, held: HeldLease, entry: str) -> None:
        """Count an entry; a reentrant lease may have several."""
        # First the lease, so that ``cancel`` finds it.
        self._leases[held.owner] = held
        if held.entries is not None:
            held.entries[entry] = self

    def exit(self, held: HeldLease) -> bool:
        """Remove one entry; returns ``True`` if it was the last and the lease is to be released."""
        entries = held.entries or {}
        if len(entries) <= 1 or held.ended:
            return True
        mine = [entry for entry, leases in entries.copy().items() if leases is self]
        if len(mine) <= 1:
            self._leases.pop(held.owner, None)
        entries.pop(mine[-1], None)
        return False

    def cancel(self, entry: str) -> None:
        """Remove what an interrupted acquire has added or entered."""
        for held in self._leases.copy().values():
            if held.owner == entry:
                self.discard(held)
                held.end_silently()
            elif held.entries is not None:
                held.entries.pop(entry, None)
                if self not in held.entries.values():
                    self._leases.pop(held.owner, None)

    def unbind(self) -> None:
        """Make the ``Lock`` itself the holder, so that the lease outlives its thread or task."""
        held = self.current()
        # A reentrant lease that was entered several times, perhaps by other handles, stays with
        # its holder.
        if held is None or len(held.entries or ()) > 1:
            return
        registry.discard(held)
        held.key, held.known_as = self._mark, None
        registry.add(held)
        if held.ended:
            # It was lost between the two calls, while the registry did not have it.
            registry.discard(held)

    def discard(self, held: HeldLease, *, lost: bool = False) -> None:
        """Stop renewing it and forget it; a loss is remembered."""
        watchdog.unwatch(held)
        self._leases.pop(held.owner, None)
        if lost:
            self.ended = held

    def collected(self, handle: object) -> None:
        """Warn about leases that nobody can release, because their ``Lock`` was garbage-collected.

        They are not released: what they guard may still run. Does no I/O, because garbage may be
        collected anywhere.
        """
        for held in self._leases.copy().values():
            if held.handle() not in (None, handle) or not held.active:
                self._drop_entries(held)
                continue
            held.stop_renewing("collected")
            text = (
                f"Lock {held.name!r} (alias {held.alias!r}) is held, and its last reference is "
                "gone: it cannot be released and ends with its TTL. Use `with`, or keep the Lock "
                "until you release it"
            )
            created = _creation_of(handle)
            dispatch.log_warning_later(
                "%s (%.1f s left%s)", text, held.remaining, created, about=held
            )
            warnings.warn(text, ResourceWarning, stacklevel=3, source=handle)

    def _drop_entries(self, held: HeldLease) -> None:
        """Remove the entries of this handle, so that the release by another handle ends the lease.

        If no other handle has an entry left, the lease can only end with its TTL.
        """
        entries = held.entries or {}
        mine = [entry for entry, handle in entries.copy().items() if handle is self]
        for entry in mine:
            entries.pop(entry, None)
        if mine and not entries:
            held.stop_renewing("collected")

    def _prune(self) -> None:
        """Forget lost leases whose thread or task has ended."""
        for held in self._leases.copy().values():
            if held.ended and (held.lost_reason == "fork" or holder_ended(held.key)):
                self.discard(held)


def _creation_of(handle: object) -> str:
    """``"; created at file:line"``, if tracemalloc knows; costs nothing while it does not trace."""
    traceback = tracemalloc.get_object_traceback(handle)
    return f"; created at {traceback[-1]}" if traceback else ""
