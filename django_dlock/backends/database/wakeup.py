"""Receives PostgreSQL's notifications for the waiters of this process.

* A process has one channel, and one connection that listens to it for all its waiters, threads
  and coroutines. A thread reads from it while anybody waits, and for a minute afterwards.
* ``expect`` is called before the waiter stores its ticket in the table, so that no notification is
  lost in between. One that arrives before ``wait`` is kept.
* A notification may be lost before this process listens and while the connection is cut. So each
  waiter is woken and asks again when listening begins, ends or fails.
* A pooler may accept LISTEN and deliver nothing. So the connection counts as listening only after
  a test notification has arrived, which this process sends through an ordinary connection. Until
  then, waiters ask again every few tenths of a second.
* After some time without notifications, the connection is tested in the same way.
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
"""Seconds between two asks of a waiter, least and most, while nothing listens for it."""
FIRST_CHECK, CHECK_EVERY = 0.05, 0.5
"""Seconds between two checks of a waiter whether it shall stop."""
SILENCE = 10.0
"""Seconds without a notification after which the connection is tested, if anybody waits."""
LOOK_EVERY = 0.5
"""Seconds between two checks whether the watched processes are dead."""
ECHO_PATIENCE = 2.0
"""Seconds within which a test notification must arrive."""
RETRY = 0.1, 30.0
"""Seconds before another attempt to listen after a failure: at first, and at most."""


class _State:
    """Whether the process listens. Each change makes a new object, so waiters notice it."""

    __slots__ = ("subscribed", "works")

    def __init__(self, *, subscribed: bool, works: bool) -> None:
        self.subscribed, self.works = subscribed, works


class _NotDelivered(Exception):
    """A test notification has not arrived."""


class Notification:
    """What one ticket waits for; a context manager, entered before the ticket is stored."""

    __slots__ = ("_payloads", "_state", "_wake", "_wakeup", "ticket")

    def __init__(self, wakeup: Wakeup, ticket: str) -> None:
        self.ticket = ticket
        self._wakeup = wakeup
        self._payloads: collections.deque[str] = collections.deque()
        self._wake: Callable[[], None] = _wake_nobody
        self._state = wakeup._state

    def __enter__(self) -> Self:
        self._wakeup._expected[self.ticket] = self
        # Earlier states of the connection do not matter to this ticket.
        self._state = self._wakeup._state
        self._wakeup._ensure_thread()
        return self

    def __exit__(self, *exc: object) -> None:
        self._wakeup._unregister(self)

    def wait(self, timeout: float, interrupted: Callable[[], bool] = lambda: False) -> str | None:
        """Block until the ticket is notified; ``None`` means "ask again", and may be a false alarm.

        Args:
            timeout: Seconds; shortened to a few tenths of a second while nothing listens.
            interrupted: Called about twice a second; ends the wait if it returns true.

        Returns:
            The payload as it was sent, including the ticket.
        """
        event = _thread_event()
        self._wake = partial(_set, event)
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
            event.acquire(timeout=max(0.0, min(until, check_at) - now))

    async def async_wait(
        self, timeout: float, interrupted: Callable[[], bool] = lambda: False
    ) -> str | None:
        """As ``wait``, for coroutines; uses no thread."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        # A weak reference: otherwise a task whose loop was closed would stay here forever.
        self._wake = partial(_set_in, loop, weakref.ref(event))
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

    def _result(self, until: float) -> tuple[bool, str | None]:
        """Whether the wait is over, and the payload received."""
        if self._payloads:
            return True, self._payloads.popleft()
        state, self._state = self._state, self._wakeup._state
        return state is not self._state or clock.now() >= until, None


class Wakeup:
    """Listens for all waiters of this process to one database.

    Every operation on a dictionary here is atomic by itself, so that no lock can be left held by a
    fork, a signal handler or a finalizer.

    Args:
        open_connection: Returns a new connection of psycopg 3 or psycopg 2 in autocommit mode, and
            never hangs.
        probe: Sends a notification (channel, payload) through an ordinary connection, and never
            hangs.
        on_unclaimed: Called with each payload whose waiter has left, on the listening thread or on
            the waiter's; must not block.
        session: Proves to other processes that this one lives, and finds out which others are dead.
        linger: Seconds for which the connection stays open after the last waiter has left.
        test_again_after: Seconds after which notifications are tested again.
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
        """Reset in a forked child; send nothing on the connection, which belongs to the parent."""
        if self._connection is not None:
            self._connection.abandon()
        if self._alarm is not None:
            self._alarm.close()
        self.channel = f"dlock_{secrets.token_hex(8)}"
        """The channel of this process, for ``pg_notify``."""
        self._connection, self._alarm = None, None
        self._state = _State(subscribed=False, works=True)
        self._expected: dict[str, Notification] = {}
        self._thread: dict[str, threading.Thread] = {}
        self._left_at = self._try_at = float("-inf")
        self._failures, self._echo = 0, ""

    def close(self) -> None:
        """Stop listening until somebody waits again."""
        thread = self._thread.pop("", None)
        if self._alarm is not None:
            self._alarm.set()
        if thread not in (None, threading.current_thread()):
            thread.join(ECHO_PATIENCE)

    @property
    def subscribed(self) -> bool:
        """Whether a notification sent now will arrive, as far as is known."""
        return self._state.subscribed

    @property
    def works(self) -> bool:
        """False if listening has failed, or a pooler drops notifications."""
        return self._state.works

    def keep_listening(self) -> None:
        """Listen for a while, even if nobody waits; never blocks."""
        self._left_at = clock.now()
        self._ensure_thread()

    def expect(self, ticket: str) -> Notification:
        """Register a waiter: ``with wakeup.expect(ticket) as notification``.

        Args:
            ticket: First word of the payload; unique to the waiter.
        """
        return Notification(self, ticket)

    def _unregister(self, notification: Notification) -> None:
        """Unregister it; a second call does no harm."""
        if self._expected.get(notification.ticket) is notification:
            self._left_at = clock.now()
            self._expected.pop(notification.ticket, None)
        self._pass_on(notification)

    def _pass_on(self, notification: Notification) -> None:
        """Called by the waiter's thread and by the listening one; passes each payload on once."""
        with contextlib.suppress(IndexError):
            while True:
                self._unclaimed(notification._payloads.popleft())

    def _unclaimed(self, payload: str) -> None:
        try:
            self._on_unclaimed(payload)
        except Exception:
            logger.exception("A notification without a waiter could not be passed on")

    # -- the listening thread --------------------------------------------------------------------

    def _ensure_thread(self) -> None:
        if self._thread:
            return
        thread = threading.Thread(target=self._run, name="dlock-listener-postgresql", daemon=True)
        try:
            # Stored before it starts, so that two waiters start only one thread.
            if self._thread.setdefault("", thread) is thread:
                thread.start()
        except BaseException as error:
            self._end_thread(thread)
            # No thread can start while the interpreter shuts down; waiters poll instead.
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
            # A waiter that came meanwhile saw this thread and started none.
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
        except Exception as error:  # noqa: BLE001 - nobody else could handle it
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
                # The claim still stands, so the session must be opened again.
                self._left_at = clock.now()

    def _read(self, connection: ListeningConnection, me: threading.Thread) -> None:
        heard_at = looked_at = clock.now()
        turn = min(SILENCE, self._linger) if self._session is None else LOOK_EVERY
        while self._is_needed(me):
            if self._session is not None and clock.now() - looked_at >= LOOK_EVERY:
                self._session.check()
                looked_at = clock.now()
            if payloads := connection.read(turn):
                self._deliver(payloads)
                heard_at = clock.now()
            elif self._expected and clock.now() - heard_at >= SILENCE:
                self._test(connection)
                heard_at = clock.now()

    def _test(self, connection: ListeningConnection) -> None:
        """Raise unless a test notification arrives."""
        # The payload has no ticket, so no waiter gets it.
        word = secrets.token_hex(4)
        self._probe(self.channel, f" {word}")
        give_up_at = clock.now() + ECHO_PATIENCE
        while self._echo != word:
            if (left := give_up_at - clock.now()) <= 0.0:
                raise _NotDelivered("notifications from PostgreSQL do not arrive")
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
                # Store the payload first: a waiter that calls ``wait`` now finds it.
                notification._payloads.append(payload)
                notification._wake()
                if self._expected.get(ticket) is not notification:
                    # The waiter left before it could see the payload.
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
                    "Not listening for released locks; waiters poll every %s to %s s: %s",
                    *POLL_INTERVAL,
                    error,
                )
        self._try_at = clock.now() + pause
        # A broken connection alone is no reason to expect the next attempt to fail.
        self._change(_State(subscribed=False, works=was.subscribed))

    def _change(self, state: _State) -> None:
        """Replace the state; each waiter notices and asks again."""
        self._state = state
        for notification in self._expected.copy().values():
            notification._wake()


def _wake_nobody() -> None:
    """The wake function of a waiter that does not wait yet."""


def _thread_event() -> Any:
    # A bare lock that is held until the event is set. An Event has a lock inside, which an
    # interrupt can leave held forever.
    event = threading.Lock()
    event.acquire()
    return event


def _set(event: Any) -> None:
    with contextlib.suppress(RuntimeError):
        event.release()  # Suppressed: the event is set already.


def _set_in(loop: asyncio.AbstractEventLoop, reference: weakref.ref[asyncio.Event]) -> None:
    event = reference()
    if event is not None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)  # Suppressed: the loop is closed, so nobody waits.
