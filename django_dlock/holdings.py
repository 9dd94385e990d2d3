"""The holds of one handle.

Usually there is one at most. A handle may be shared, as a module-level ``threading.Lock`` is:
then each thread or task has its own, and one that lost its lease must not take another's for it.
"""

from __future__ import annotations

import asyncio
import threading

from . import watchdog
from .hold import Hold, HolderKey, holder_ended, registry

__all__ = ["Holdings"]


class Holdings:
    """Holder → hold, and how often a reentrant holder entered through this handle."""

    __slots__ = ("_bound", "_depths", "_holds", "_mark", "ended")

    def __init__(self, bound: bool) -> None:
        self._bound = bound
        self._mark = object()
        self._holds: dict[HolderKey, Hold] = {}
        self._depths: dict[HolderKey, int] = {}
        self.ended: Hold | None = None
        """The last lost hold, kept so that the handle can say what happened."""

    def mine(self) -> Hold | None:
        """The caller's hold; else the only or latest one, for any thread may release.

        With none left, the last lost one.
        """
        if not self._holds:
            return self.ended
        # A copy, which is one step: another thread may come or go meanwhile.
        holds = self._holds.copy()
        if len(holds) > 1:
            own = holds.get(self._caller())
            if own is not None:
                return own
        return next(reversed(holds.values()), self.ended)

    def current(self) -> Hold | None:
        """As ``mine``, without what is over."""
        hold = self.mine()
        return None if hold is self.ended else hold

    def thread_key(self) -> HolderKey:
        """Who holds after a synchronous acquire."""
        return threading.current_thread() if self._bound else self._mark

    def task_key(self) -> HolderKey:
        """Who holds after ``async with``."""
        return asyncio.current_task() if self._bound else self._mark

    def handle_key(self) -> HolderKey:
        """The handle itself."""
        return self._mark

    def add(self, hold: Hold) -> None:
        """Take a fresh grant into the handle, the registry and the watchdog's care."""
        if self._holds:
            self._prune()
        self.ended = None
        self._holds[hold.key] = hold
        self._depths[hold.key] = 1
        registry.add(hold)
        watchdog.watch(hold)

    def enter_again(self, hold: Hold) -> None:
        """Another entry of the same holder into a reentrant hold."""
        key = hold.key
        hold.depth += 1
        self._depths[key] = self._depths.get(key, 0) + 1
        self._holds[key] = hold

    def leave(self, hold: Hold) -> bool:
        """One entry fewer; true where it was the last and the lease is to be given back."""
        if hold.depth <= 1 or hold.ended:
            return True
        hold.depth -= 1
        if self._depths.get(hold.key, 1) > 1:
            self._depths[hold.key] -= 1
        else:
            self._forget(hold)
        return False

    def hand_over(self) -> None:
        """Make the handle itself the holder: the hold then outlives its thread or task."""
        hold = self.current()
        # One that other handles share stays with the holder they have in common.
        if hold is None or hold.depth > 1:
            return
        self._forget(hold)
        registry.drop(hold)
        hold.key = self._mark
        self._holds[hold.key] = hold
        self._depths[hold.key] = 1
        registry.add(hold)
        if hold.ended:
            # Lost between the two, when the registry did not have it to drop.
            registry.drop(hold)

    def drop(self, hold: Hold, *, lost: bool = False) -> None:
        """It is over: renew it no more and forget it, but for the memory of a loss."""
        watchdog.unwatch(hold)
        self._forget(hold)
        if lost:
            self.ended = hold

    def owned_by(self, owner: str) -> Hold | None:
        """The hold of this very grant."""
        return next((hold for hold in self._holds.copy().values() if hold.owner == owner), None)

    def _forget(self, hold: Hold) -> None:
        if self._holds.get(hold.key) is hold:
            self._holds.pop(hold.key, None)
            self._depths.pop(hold.key, None)

    def _prune(self) -> None:
        """Forget lost holds whose holder will never come to hear of it."""
        for key, hold in self._holds.copy().items():
            if hold.ended and (hold.lost_reason == "fork" or holder_ended(key)):
                self.drop(hold)

    def _caller(self) -> HolderKey:
        if not self._bound:
            return self._mark
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        if task is not None and task in self._holds:
            return task
        return threading.current_thread()
