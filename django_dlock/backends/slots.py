"""How many calls may use a connection at once, and which calls get one first.

This module uses no thread lock, which a fork, a signal handler or a finalizer could find locked.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import weakref
from typing import TypeAlias

from .. import clock
from ..process.points import reached

SlotQueue: TypeAlias = "queue.SimpleQueue[Slot]"


class _Returned:
    """A slot that was returned."""

    __slots__ = ("_kind", "_number", "_right", "_slots")

    def release(self) -> None:
        """No effect: only the first call has one."""


class Slot(_Returned):
    """The right to use one connection; it is returned even if an interrupt drops it.

    Each caller gets an object of its own. The traceback of an error keeps the object of the call
    that failed; were it the next caller's, too, the finalizer would not return it.

    Args:
        right: One item, the number of the only object that can return the right.
    """

    __slots__ = ()

    def __init__(self, slots: weakref.ref[Slots], kind: int, right: list[int], number: int) -> None:
        # Weak, so that slots do not return to a pool that a forked child has discarded.
        self._slots, self._kind = slots, kind
        self._right, self._number = right, number

    def release(self) -> None:
        """Return the right; only the first call has an effect."""
        slots = self._slots()
        if slots is not None and self._right[0] == self._number:
            slots.free[self._kind].put(self._successor())
            # Without a finalizer, in which Python would swallow an interrupt.
            self.__class__ = _Returned  # type: ignore[assignment]
            # Only now: a call that begins to wait from here on finds the slot by itself.
            if any(slots.users[self._kind]):
                slots.serve(self._kind)

    def __del__(self) -> None:
        # An interrupt may have left it without attributes: then another object has the right.
        with contextlib.suppress(AttributeError):
            self.release()

    def _successor(self) -> Slot:
        """The object of the next caller; this one has lost the right."""
        new = Slot(self._slots, self._kind, self._right, self._number + 1)
        # One step: an interrupt before or after it leaves one object that returns the right.
        self._right[0] = new._number
        return new


class Slots:
    """The slots of one pool, of several kinds.

    Calls of urgency 0 may use only the slots of the first kind. The more urgent a call, the more
    kinds it may use, and the earlier it is served; so it never queues behind less urgent calls.

    Args:
        counts: How many slots there are of each kind.
    """

    def __init__(self, *counts: int) -> None:
        self.free: tuple[SlotQueue, ...] = tuple(queue.SimpleQueue() for _ in counts)
        # For each urgency, the callers that wait: each has a queue into which one slot is put.
        self._waiting: tuple[collections.deque[SlotQueue], ...] = tuple(
            collections.deque() for _ in counts
        )
        # Ordinary slots are taken first, so that the others stay free for urgent calls.
        self._usable = [self.free[: urgency + 1] for urgency in range(len(counts))]
        self.users = [self._waiting[kind:][::-1] for kind in range(len(counts))]
        for kind, count in enumerate(counts):
            for _ in range(count):
                self.free[kind].put(Slot(weakref.ref(self), kind, [0], 0))

    def take_now(self, urgency: int) -> Slot | None:
        """A slot that is free now."""
        for free in self._usable[urgency]:
            try:
                return free.get_nowait()
            except queue.Empty:  # noqa: PERF203 - there are two or three
                pass
        return None

    def take(self, urgency: int, deadline: float) -> Slot | None:
        """A slot; ``None`` if none was free by the deadline."""
        return self.take_now(urgency) or self._wait(urgency, deadline)

    def _wait(self, urgency: int, deadline: float) -> Slot | None:
        # If this call ends with a slot in its queue, the slot's finalizer returns it.
        mine: SlotQueue = queue.SimpleQueue()
        waiting = self._waiting[urgency]
        waiting.append(mine)
        try:
            # One may have been returned before this call was known to wait.
            slot = self.take_now(urgency)
            if slot is not None:
                return slot
            reached("pool.waiting", urgency=urgency)
            return mine.get(timeout=max(0.0, deadline - clock.now()))
        except queue.Empty:
            return None
        finally:
            with contextlib.suppress(ValueError):
                waiting.remove(mine)
            # The traceback of an interrupt would keep it.
            del mine

    def serve(self, kind: int) -> None:
        """Give free slots of this kind to the calls that wait for one, the most urgent first."""
        free = self.free[kind]
        while any(self.users[kind]):
            try:
                slot = free.get_nowait()
            except queue.Empty:
                return
            for waiting in self.users[kind]:
                with contextlib.suppress(IndexError):
                    waiting.popleft().put(slot)
                    break
            else:
                # They have given up meanwhile.
                free.put(slot)
