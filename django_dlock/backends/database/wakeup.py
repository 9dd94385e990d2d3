"""Where the waiters of this process hear, on PostgreSQL, that a lease was handed over to them.

* A process has one channel, and one connection that listens to it, for all its waiters: threads
  and coroutines. A thread reads it while anybody waits, and for a minute afterwards.
* ``expect`` comes before the waiter puts its ticket into the table, so that no notification is
  lost between the two. One that comes before ``wait`` is kept.
* A notification may be lost before this process listens and while the connection is cut. So each
  waiter is woken when listening begins, ends or fails, and asks again.
* A pooler may take LISTEN and deliver nothing. So it does not count as listening before a
  notification of our own has arrived, sent through an ordinary connection. Until then, waiters ask
  again every few tenths of a second.
* A connection on which nothing was heard for a while is tested in the same way.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import random
import secrets
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import clock
from .listen_connection import Alarm, ListeningConnection, Stopped
from .sessions import SessionProof

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Notification", "Wakeup"]

logger = logging.getLogger("django_dlock")

POLL_INTERVAL = 0.1, 0.5
"""Seconds between two asks of a waiter, from and to, while nobody listens for it."""
FIRST_CHECK, CHECK_EVERY = 0.05, 0.5
"""Seconds after which a waiter checks whether it is to stop, and again."""
SILENCE = 10.0
"""Seconds without a notification after which the connection is tested, if anybody waits."""
LOOK_EVERY = 0.5
"""Seconds after which it is looked again whether the processes watched are dead."""
ECHO_PATIENCE = 2.0
"""Seconds within which a notification of our own must arrive."""
RETRY = 0.1, 30.0
"""Seconds before listening is tried again after a failure: at first, and at the most."""


class _State:
    """Whether the process listens. Each change is a new object, by which waiters notice it."""

    __slots__ = ("subscribed", "works")

    def __init__(self, *, subscribed: bool, works: bool) -> None:
        self.subscribed, self.works = subscribed, works


class _NotDelivered(Exception):
    """A notification of our own has not arrived."""


class Notification:
    """What one ticket waits for; a context manager, to be entered before the ticket is stored."""

    __slots__ = ("_payloads", "_state", "_wake", "_wakeup", "ticket")

    def __init__(self, wakeup: Wakeup, ticket: str) -> None:
        self.ticket = ticket
        self._wakeup = wakeup
        self._payloads: collections.deque[str] = collections.deque()
        self._wake: Callable[[], None] = _wake_nobody
        self._state = wakeup._state

    def __enter__(self) -> Self:
        self._wakeup._expected[self.ticket] = self
        # What it was before the ticket became known does not count.
        self._state = self._wakeup._state
        self._wakeup._ensure_thread()
        return self

    def __exit__(self, *exc: object) -> None:
        self._wakeup._leave(self)

    def wait(self, timeout: float, interrupted: Callable[[], bool] = lambda: False) -> str | None:
        """Block until the ticket is notified; ``None`` says "ask again", and may be wrong.

        Args:
            timeout: Seconds. While nobody listens, it is shortened to a few tenths of a second.
            interrupted: Asked about twice a second; ends the wait when true.

        Returns:
            The payload as it was sent, with the ticket.
        """
        event = _thread_event()
        self._wake = partial(_set, event)
        until = self._until(timeout)
        check_at = clock.now() + FIRST_CHECK
        while True:
            over, payload = self._heard(until)
            if over:
                return payload
            now = clock.now()
            if now >= check_at:
                if interrupted():
                    return None
                check_at = now + CHECK_EVERY
            event.acquire(timeout=max(0.0, min(until, check_at) - now))

    async def async_wait(
        self, timeout: float, interrupted: Callable[[], bool] = lambda: False
    ) -> str | None:
        """As ``wait``, for coroutines; takes no thread."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        # Weak: else a task whose loop was closed would wait here for ever.
        self._wake = partial(_set_in, loop, weakref.ref(event))
        until = self._until(timeout)
        check_at = clock.now() + FIRST_CHECK
        while True:
            event.clear()
            over, payload = self._heard(until)
            if over:
                return payload
            now = clock.now()
            if now >= check_at:
                if interrupted():
                    return None
                check_at = now + CHECK_EVERY
            # Not asyncio.wait_for, which makes a task for each turn.
            timer = loop.call_later(max(0.0, min(until, check_at) - now), event.set)
            try:
                await event.wait()
            finally:
                timer.cancel()

    def _until(self, timeout: float) -> float:
        self._wakeup._ensure_thread()
        if not self._state.subscribed:
            timeout = min(timeout, random.uniform(*POLL_INTERVAL))
        return clock.now() + timeout

    def _heard(self, until: float) -> tuple[bool, str | None]:
        """Whether the wait is over, and with which payload."""
        if self._payloads:
            return True, self._payloads.popleft()
        state, self._state = self._state, self._wakeup._state
        return state is not self._state or clock.now() >= until, None


class Wakeup:
    """Listens for all waiters of this process to one database.

    Every step upon a dictionary is atomic by itself, so that no lock can be left held by a fork, a
    signal handler or a finalizer.

    Args:
        open_connection: Gives a new connection of psycopg 3 or psycopg 2 in autocommit mode, and
            never hangs.
        probe: Sends a notification (channel, payload) through an ordinary connection, and never
            hangs.
        on_unclaimed: Called with each payload whose waiter has left, on the listening thread or on
            that of the waiter; must not block.
        session: What proves to others that this process lives, and to this one that others do not.
        linger: Seconds for which the connection stays open after the last waiter has left.
        test_again_after: Seconds after which it is tested again whether notifications arrive.
    """

    def __init__(
        self,
        open_connection: Callable[[], Any],
        probe: Callable[[str, str], object],
        *,
        on_unclaimed: Callable[[str], None] = lambda payload: None,
        session: SessionProof | None = None,
        linger: float = 60.0,
        test_again_after: float = 60.0,
    ) -> None:
        self._open_connection, self._probe = open_connection, probe
        self._on_unclaimed, self._session = on_unclaimed, session
        self._linger, self._test_again_after = linger, test_again_after
        self._connection: ListeningConnection | None = None
        self._alarm: Alarm | None = None
        self.forget()

    def forget(self) -> None:
        """Start anew in a forked child, without a word on the connection, which is the parent's."""
        if self._connection is not None:
            self._connection.abandon()
        if self._alarm is not None:
            self._alarm.close()
        self.channel = f"dlock_{secrets.token_hex(8)}"
        """The channel of this process, which ``pg_notify`` names."""
        self._connection, self._alarm = None, None
        self._state = _State(subscribed=False, works=True)
        self._expected: dict[str, Notification] = {}
        self._thread: dict[str, threading.Thread] = {}
        self._left_at = self._try_at = float("-inf")
        self._failures, self._echo = 0, ""

    def close(self) -> None:
        """Stop listening, until somebody waits again."""
        thread = self._thread.pop("", None)
        if self._alarm is not None:
            self._alarm.set()
        if thread not in (None, threading.current_thread()):
            thread.join(ECHO_PATIENCE)

    @property
    def subscribed(self) -> bool:
        """Whether a notification that is sent now will arrive, as far as is known."""
        return self._state.subscribed

    @property
    def works(self) -> bool:
        """False if listening has failed, or a pooler swallows notifications."""
        return self._state.works

    def stay(self) -> None:
        """Listen for a while, whether or not anybody waits; never blocks."""
        self._left_at = clock.now()
        self._ensure_thread()

    def expect(self, ticket: str) -> Notification:
        """What to wait with; ``with wakeup.expect(ticket) as notification``.

        Args:
            ticket: First word of the payload; no two waiters have the same.
        """
        return Notification(self, ticket)

    def _leave(self, notification: Notification) -> None:
        """Expect it no more; twice does no harm."""
        if self._expected.get(notification.ticket) is notification:
            self._left_at = clock.now()
            self._expected.pop(notification.ticket, None)
        self._pass_on(notification)

    def _pass_on(self, notification: Notification) -> None:
        """Both its own thread and the listening one may do this: each payload goes once."""
        with contextlib.suppress(IndexError):
            while True:
                self._unclaimed(notification._payloads.popleft())

    def _unclaimed(self, payload: str) -> None:
        try:
            self._on_unclaimed(payload)
        except Exception:
            logger.exception("A notification that nobody expects could not be passed on")

    # -- the thread --------------------------------------------------------------------

    def _ensure_thread(self) -> None:
        if self._thread:
            return
        thread = threading.Thread(target=self._run, name="dlock-listener-postgresql", daemon=True)
        try:
            # Entered before it starts, so that two waiters start one thread.
            if self._thread.setdefault("", thread) is thread:
                thread.start()
        except BaseException as error:
            self._end_thread(thread)
            # No new threads while the interpreter ends: waiters ask again and again.
            if not isinstance(error, RuntimeError):
                raise

    def _end_thread(self, thread: threading.Thread) -> None:
        if self._thread.get("") is thread:
            self._thread.pop("", None)

    def _run(self) -> None:
        me, alarm = threading.current_thread(), Alarm()
        self._alarm = alarm
        try:
            while self._is_needed(me):
                if (pause := self._try_at - clock.now()) > 0.0:
                    alarm.wait(min(pause, CHECK_EVERY))
                else:
                    self._listen(me, alarm)
        except Stopped:
            pass
        finally:
            alarm.close()
            self._end_thread(me)
            # A waiter that came meanwhile found this thread.
            if self._expected:
                self._ensure_thread()

    def _is_needed(self, me: threading.Thread) -> bool:
        waited_for = self._expected or clock.now() < self._left_at + self._linger
        return bool(waited_for) and self._thread.get("") is me

    def _listen(self, me: threading.Thread, alarm: Alarm) -> None:
        """Listen until nobody waits any more or the connection fails; survives any error."""
        began = clock.now()
        try:
            self._connection = ListeningConnection(self._open_connection(), self.channel, alarm)
            self._test(self._connection)
            if self._session is not None:
                self._session.take(self._connection)
            self._change(_State(subscribed=True, works=True))
            self._read(self._connection, me)
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - nobody else could heed it
            self._failed(error, lasted=clock.now() - began)
        finally:
            self._withdraw()
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
            if self._state.subscribed:
                self._change(_State(subscribed=False, works=True))

    def _withdraw(self) -> None:
        if self._session is not None:
            try:
                self._session.withdraw()
            except Exception:  # noqa: BLE001 - see below
                # The claim stands, so there must be a session again.
                self._left_at = clock.now()

    def _read(self, connection: ListeningConnection, me: threading.Thread) -> None:
        heard_at = looked_at = clock.now()
        turn = min(SILENCE, self._linger) if self._session is None else LOOK_EVERY
        while self._is_needed(me):
            if self._session is not None and clock.now() - looked_at >= LOOK_EVERY:
                self._session.look()
                looked_at = clock.now()
            if payloads := connection.read(turn):
                self._deliver(payloads)
                heard_at = clock.now()
            elif self._expected and clock.now() - heard_at >= SILENCE:
                self._test(connection)
                heard_at = clock.now()

    def _test(self, connection: ListeningConnection) -> None:
        """Raise unless a notification of our own arrives."""
        # It has no ticket, so no waiter gets it.
        word = secrets.token_hex(4)
        self._probe(self.channel, f" {word}")
        give_up_at = clock.now() + ECHO_PATIENCE
        while self._echo != word:
            if (left := give_up_at - clock.now()) <= 0.0:
                raise _NotDelivered("PostgreSQL's notifications do not arrive")
            self._deliver(connection.read(left))

    def _deliver(self, payloads: list[str]) -> None:
        for payload in payloads:
            ticket, _, rest = payload.partition(" ")
            notification = self._expected.get(ticket)
            if not ticket:
                self._echo = rest
            elif notification is None:
                self._unclaimed(payload)
            else:
                # First the payload: one who comes to wait now finds it.
                notification._payloads.append(payload)
                notification._wake()
                if self._expected.get(ticket) is not notification:
                    # It left before it could see the payload.
                    self._pass_on(notification)

    def _failed(self, error: Exception, *, lasted: float) -> None:
        was = self._state
        if lasted > SILENCE:
            self._failures = 0
        pause = min(RETRY[0] * 2**self._failures, RETRY[1]) * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 10)
        if not was.subscribed:
            if isinstance(error, _NotDelivered):
                pause = self._test_again_after
            if was.works:
                logger.warning(
                    "Nobody listens for released locks, so waiters ask again every %s to %s s: %s",
                    *POLL_INTERVAL,
                    error,
                )
        self._try_at = clock.now() + pause
        # A cut alone is no reason to believe that it will not work again.
        self._change(_State(subscribed=False, works=was.subscribed))

    def _change(self, state: _State) -> None:
        """Each waiter asks again."""
        self._state = state
        for notification in self._expected.copy().values():
            notification._wake()


def _wake_nobody() -> None:
    """Of a waiter that does not wait yet."""


def _thread_event() -> Any:
    # A bare lock that is held until it is set: an interrupt can leave an Event's own lock held for
    # ever.
    event = threading.Lock()
    event.acquire()
    return event


def _set(event: Any) -> None:
    with contextlib.suppress(RuntimeError):
        event.release()  # Unless it is set already.


def _set_in(loop: asyncio.AbstractEventLoop, reference: weakref.ref[asyncio.Event]) -> None:
    event = reference()
    if event is not None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)  # Unless it is closed: nobody waits there.
