"""Where a waiter of this process receives the notification of its lease, and waits for it."""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import clock
from ...process.points import reached
from ..loop_event import LoopEvent

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["POLL_INTERVAL", "PendingNotification", "State", "Waiters", "set_event", "thread_event"]

POLL_INTERVAL = 0.1, 0.5
"""Shortest and longest pause before a waiter asks again, in seconds, while nothing listens."""
MOST_KEPT = 2
"""Notifications that are kept for one waiter; a stranger may send any number."""
FIRST_CHECK, CHECK_EVERY = 0.05, 0.5
"""Seconds before a waiter first checks whether to stop, and between further checks."""


class State:
    """Whether the process listens. Each change makes a new object, so waiters notice it.

    Attributes:
        subscribed: A notification sent now will arrive, as far as is known.
        works: False if listening has failed, or a pooler drops notifications.
    """

    __slots__ = ("subscribed", "works")

    def __init__(self, *, subscribed: bool, works: bool) -> None:
        self.subscribed, self.works = subscribed, works


class Waiters:
    """Everybody in this process who waits for a notification.

    Every operation on a dictionary here is atomic by itself, so that no lock can be left held by a
    fork, a signal handler or a finalizer.

    Args:
        ensure_listening: Called for each of them, and again while nothing listens; never blocks.

    Attributes:
        state: Whether the process listens.
        needed_at: When somebody last needed the connection; it stays open for a while after that.
    """

    def __init__(self, ensure_listening: Callable[[], None]) -> None:
        self.ensure_listening = ensure_listening
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, which has no other thread."""
        self.state = State(subscribed=False, works=True)
        self.needed_at = float("-inf")
        self._pending: dict[str, PendingNotification] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def register(self, pending: PendingNotification) -> None:
        self._pending[pending.owner] = pending

    def unregister(self, pending: PendingNotification) -> None:
        """Forget it; a second call does no harm."""
        if self._pending.get(pending.owner) is pending:
            if pending.listened:
                self.needed_at = clock.now()
            self._pending.pop(pending.owner, None)

    def change(self, state: State) -> None:
        """Replace the state; each waiter notices and asks again."""
        self.state = state
        for pending in self._pending.copy().values():
            pending.wake()

    def deliver(self, payload: str) -> None:
        """Wake the waiter whose owner is the first word.

        If it has left, the payload is dropped: a waiter that leaves asks once more or cancels its
        acquire, and the row has the lease.
        """
        pending = self._pending.get(payload.partition(" ")[0])
        if pending is not None:
            # Store the payload first: a waiter that calls ``wait`` now finds it.
            pending.payloads.append(payload)
            reached("listener.message", waiter=pending.owner)
            pending.wake()


class PendingNotification:
    """Receives what is sent to one waiter.

    A context manager, entered before the ticket is stored.
    """

    __slots__ = ("__weakref__", "_state", "_waiters", "listened", "owner", "payloads", "wake")

    def __init__(self, waiters: Waiters, owner: str) -> None:
        # Only the first one counts, because after any of them its waiter asks again.
        self.owner, self.payloads = owner, collections.deque[str](maxlen=MOST_KEPT)
        self.wake: Callable[[], None] = wake_nobody
        self._waiters, self._state = waiters, waiters.state
        # Most callers get their lease at once. They do not keep the connection open.
        self.listened = False

    def __enter__(self) -> Self:
        self._waiters.register(self)
        # Earlier states of the connection do not matter to this ticket.
        self._state = self._waiters.state
        return self

    def __exit__(self, *exc: object) -> None:
        self._waiters.unregister(self)

    def listen(self) -> None:
        """Begin to listen, if the process does not; ``wait`` does it, too.

        A ticket that was stored before misses nothing: its waiter asks again when listening begins.
        """
        self.listened = True
        self._waiters.ensure_listening()

    def wait(self, timeout: float, interrupted: Callable[[], bool] = lambda: False) -> str | None:
        """Block until the owner is notified; ``None`` means "ask again", and may be a false alarm.

        Args:
            timeout: Seconds; shortened to a few tenths of a second while nothing listens.
            interrupted: Called about twice a second; ends the wait if it returns true.

        Returns:
            The payload as it was sent, including the owner.
        """
        event = thread_event()
        self.wake = partial(set_event, event)
        until = self._until(timeout)
        check_at = clock.now() + FIRST_CHECK
        while True:
            over, payload = self._result(until)
            if over:
                return payload
            now = clock.now()
            if now >= check_at:
                if interrupted():
                    return None
                check_at = now + CHECK_EVERY
            reached("wait.asleep", waiter=self.owner)
            event.acquire(timeout=max(0.0, min(until, check_at) - now))

    async def async_wait(
        self,
        timeout: float,
        interrupted: Callable[[], bool] = lambda: False,
        abandoned: Callable[[], object] = lambda: None,
    ) -> str | None:
        """As ``wait``, for coroutines; uses no thread.

        Args:
            abandoned: See ``LoopEvent``.
        """
        event = LoopEvent(partial(_abandoned, weakref.ref(self), abandoned))
        self.wake = event.wake
        until = self._until(timeout)
        check_at = clock.now() + FIRST_CHECK
        while True:
            event.clear()
            over, payload = self._result(until)
            if over:
                return payload
            now = clock.now()
            if now >= check_at:
                if interrupted():
                    return None
                check_at = now + CHECK_EVERY
            reached("wait.asleep", waiter=self.owner)
            await event.sleep(min(until, check_at))

    def _until(self, timeout: float) -> float:
        self.listen()
        if not self._state.subscribed:
            timeout = min(timeout, random.uniform(*POLL_INTERVAL))
        return clock.now() + timeout

    def _result(self, until: float) -> tuple[bool, str | None]:
        """Whether the wait is over, and the payload received."""
        if self.payloads:
            return True, self.payloads.popleft()
        state, self._state = self._state, self._waiters.state
        return state is not self._state or clock.now() >= until, None


def wake_nobody() -> None:
    """The wake function of a waiter that does not wait yet."""


def thread_event() -> Any:
    # A bare lock that is held until the event is set. An Event has a lock inside, which an
    # interrupt can leave held forever.
    event = threading.Lock()
    event.acquire()
    return event


def set_event(event: Any) -> None:
    with contextlib.suppress(RuntimeError):
        event.release()  # Suppressed: the event is set already.


def _abandoned(
    reference: weakref.ref[PendingNotification], abandoned: Callable[[], object]
) -> None:
    pending = reference()
    if pending is not None:
        pending.__exit__()
    abandoned()
