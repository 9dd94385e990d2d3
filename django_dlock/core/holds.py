"""What one ``Lock`` holds: one ``Hold`` for each acquire that was not released yet.

Usually there is one at most. A handle may be shared, as a module-level ``threading.Lock`` is:
then each thread or task has a hold of its own, and one that lost its lease must not use another's
instead. Reentrant handles have several holds on one lease.

A hold whose lease was lost ends when its holder acquires again. If it was that of a ``with``
block, the end of the block still tells the loss.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import tracemalloc
import warnings
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import clock, process
from . import dispatch, watchdog
from .held_lease import HeldLease, registry
from .registry import HolderKey, holder_ended

if TYPE_CHECKING:
    from .options import LockOptions

MOST_LOST = 100
"""Holds of a handle that are kept after a loss although nobody has asked about it."""

Caller: TypeAlias = tuple[object, HolderKey, HolderKey, tuple[HolderKey, ...]]
"""Who acquires: ``Hold.by``; the future holder; another key under which the registry will find the
lease; and keys whose leases the caller must not wait for, because it would wait for itself."""


def this_caller() -> object:
    """The asyncio task that runs here, else the thread."""
    loop = asyncio._get_running_loop()
    return (loop and asyncio.current_task(loop)) or threading.current_thread()


class Hold:
    """One acquire of a ``Lock``.

    Attributes:
        entry: The owner in its request; that of the lease, unless it entered a reentrant one.
        by: The task or thread that has called the acquire, whoever is the holder.
        key: The holder: ``by``, its thread, or what stands for the handle.
        block: Whether a ``with`` block began with it.
        max_end: When its ``max_hold`` ends the lease.
    """

    __slots__ = ("block", "by", "entry", "handle", "key", "lease", "max_end", "options")

    def __init__(
        self, lease: HeldLease, entry: str, by: object, handle: Any, options: LockOptions
    ) -> None:
        self.lease, self.entry, self.key, self.options = lease, entry, lease.key, options
        self.by, self.handle, self.block = by, weakref.ref(handle), False
        self.max_end = lease.max_end if entry == lease.owner else clock.now() + options.max_hold

    def call_on_lost(self, handle: Any, reason: str) -> None:
        """Call the ``on_lost`` of its ``Lock``."""
        if (on_lost := self.options.on_lost) is not None:
            result = on_lost(handle, reason)
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(f"on_lost of {handle!r} returned a coroutine, which nobody awaits")


class HandleHolds:
    """Holds by entry. If an interrupt cuts a method short, a second call completes it."""

    __slots__ = ("_bound", "_holds", "_mark", "_replaced", "ended")

    def __init__(self, bound: bool) -> None:
        self._bound = bound
        self._mark = object()
        self._holds: dict[str, Hold] = {}
        # Holds of ``with`` blocks that lost their leases, whose holders have acquired again.
        self._replaced: tuple[Hold, ...] = ()
        self.ended: HeldLease | None = None
        """The last lease that was lost, so that the ``Lock`` can say what happened."""

    def current(self) -> Hold | None:
        """The caller's hold; else the only or latest one, because any thread may release."""
        process.notice_fork()
        if not self._holds:
            return None
        # A copy is one atomic step; another thread may change the dict meanwhile.
        holds = self._holds.copy()
        if len(holds) > 1:
            return self._of_caller([*holds.values()])
        return next(iter(holds.values()), None)

    def mine(self) -> HeldLease | None:
        """The lease of ``current``; if there is none, the last one that was lost."""
        hold = self.current()
        return self.ended if hold is None else hold.lease

    def _of_caller(self, holds: list[Hold]) -> Hold:
        me, thread = this_caller(), threading.current_thread()
        for mine in (
            [hold for hold in holds if hold.by is me],
            [hold for hold in holds if hold.key is self._mark],
            [hold for hold in holds if hold.by is thread],
        ):
            if mine:
                return mine[-1]
        return holds[-1]

    def of_block(self) -> tuple[Hold | None, Hold | None]:
        """What the ``with`` block that ends now has to release; and the hold with which it began,
        if that was lost and its holder has acquired again."""
        hold, replaced = self.current(), self._replaced
        if not replaced:
            return hold, None
        me = this_caller()
        is_mine = hold is not None and hold.by is me
        if hold is not None and is_mine and hold.block:
            return hold, None
        lost = next((each for each in reversed(replaced) if each.by is me), None)
        if lost is None:
            # A block may end on another thread than the one on which it began.
            return hold, None if hold is not None else replaced[-1]
        return hold if is_mine else None, lost

    # -- who acquires ------------------------------------------------------------------

    def caller_thread(self) -> Caller:
        """The caller of a synchronous acquire."""
        me = this_caller()
        if not self._bound:
            return me, self._mark, None, ()
        thread = threading.current_thread()
        return me, thread, None, () if me is thread else (me, (me,))

    def caller_task(self) -> Caller:
        """The caller of ``async with``."""
        me, thread = this_caller(), threading.current_thread()
        if not self._bound or me is thread:
            return me, self._mark, None, ()
        return me, me, None, ((me,), thread)

    def caller_handle(self, by: object) -> Caller:
        """The caller of ``aacquire``: the ``Lock`` holds, but its task must not wait for itself.

        Args:
            by: Who has called it; perhaps not the task that runs it.
        """
        me, thread = this_caller(), threading.current_thread()
        if not self._bound or me is thread:
            return by, self._mark, None, ()
        return by, self._mark, (me,), (me, thread)

    def find(self, name: str, *, blocks_thread: bool) -> HeldLease | None:
        """A lease of this handle for which the caller would wait for ever.

        Args:
            blocks_thread: Whether the caller, while it waits, keeps the event loop from running.
        """
        if not self._holds:
            return None
        me, thread = this_caller(), threading.current_thread()
        for hold in self._holds.copy().values():
            if hold.lease.name != name or not hold.lease.active:
                continue
            task = hold.by if isinstance(hold.by, asyncio.Task) else None
            if (
                hold.by in (me, thread)
                # Nobody is left but the handle itself.
                or (task is not None and task.done() and hold.key is self._mark)
                or (task is not None and blocks_thread and _runs_here(task))
            ):
                return hold.lease
        return None

    # -- adding and dropping -----------------------------------------------------------

    def add(self, held: HeldLease, by: object, handle: Any) -> None:
        """Add a new lease to this handle, the registry and the watchdog."""
        if self._holds:
            self._end_lost(held, by)
        self.ended = None
        self.enter(held, held.owner, by, handle, held.options)
        registry.add(held)
        watchdog.watch(held)

    def enter(
        self, held: HeldLease, entry: str, by: object, handle: Any, options: LockOptions
    ) -> Hold:
        """Add a hold; a reentrant lease may have several."""
        # First to the handle, so that ``cancel`` finds it.
        hold = self._holds[entry] = Hold(held, entry, by, handle, options)
        held.holds[entry] = hold
        if entry != held.owner and held.note_entry(options):
            watchdog.watch(held)
        return hold

    def begin_block(self, entry: str) -> None:
        """Note that a ``with`` block begins with this hold."""
        self._holds[entry].block = True

    def has(self, hold: Hold) -> bool:
        """Whether it was not released yet."""
        return self._holds.get(hold.entry) is hold

    def remove(self, hold: Hold) -> None:
        """End a hold whose lease has others."""
        held = hold.lease
        self._holds.pop(hold.entry, None)
        held.holds.pop(hold.entry, None)
        if held.active:
            held.note_exit(clock.now())
            # It may be due before the watchdog next wakes.
            watchdog.watch(held)

    def cancel(self, entry: str) -> None:
        """Remove what an interrupted acquire has added or entered."""
        hold = self._holds.get(entry)
        if hold is None:
            return
        if hold.lease.owner == entry:
            self.discard(hold)
            hold.lease.end_silently()
        else:
            self.remove(hold)

    def unbind(self) -> None:
        """Make the ``Lock`` itself the holder, so that the lease outlives its thread or task."""
        hold = self.current()
        # A reentrant lease that was entered several times, perhaps by other handles, stays with
        # its holder.
        if hold is None or len(hold.lease.holds) > 1:
            return
        held = hold.lease
        registry.discard(held)
        hold.key = held.key = self._mark
        held.known_as = None
        registry.add(held)
        if held.ended:
            # It was lost between the two calls, while the registry did not have it.
            registry.discard(held)

    def discard(self, hold: Hold, *, lost: bool = False) -> None:
        """Stop renewing its lease and forget it; a loss is remembered."""
        watchdog.unwatch(hold.lease)
        self._holds.pop(hold.entry, None)
        if self._replaced:
            self._replaced = tuple(each for each in self._replaced if each is not hold)
        if lost:
            self.ended = hold.lease

    def collected(self, handle: object) -> None:
        """Warn about leases that nobody can release, because their ``Lock`` was garbage-collected.

        They are not released: what they guard may still run. Does no I/O, because garbage may be
        collected anywhere.
        """
        for hold in self._holds.copy().values():
            held = hold.lease
            held.holds.pop(hold.entry, None)
            if held.holds or not held.active:
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

    def _end_lost(self, new: HeldLease, by: object) -> None:
        """End the holds that the holder of a new lease has lost, and forget those of the past."""
        unasked = []
        for hold in self._holds.copy().values():
            lost = hold.lease
            if lost.active:
                continue
            if lost.lost_reason == "fork":
                # Owned by the parent process; the child leaves its block silently.
                self.discard(hold)
            elif lost.name == new.name and (hold.by is by or hold.key is new.key is self._mark):
                if hold.block:
                    self._replaced += (hold,)
                self._holds.pop(hold.entry, None)
            elif holder_ended(lost.key):
                self.discard(hold)
            elif not hold.block:
                unasked.append(hold)
        for hold in unasked[:-MOST_LOST]:
            self.discard(hold)


def _runs_here(task: asyncio.Task[Any]) -> bool:
    """Whether its event loop runs on this thread, or on none."""
    loop = task.get_loop()
    return loop is asyncio._get_running_loop() or not loop.is_running()


def _creation_of(handle: object) -> str:
    """``"; created at file:line"``, if tracemalloc knows; costs nothing while it does not trace."""
    traceback = tracemalloc.get_object_traceback(handle)
    return f"; created at {traceback[-1]}" if traceback else ""
