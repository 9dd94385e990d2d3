"""The thread that receives PostgreSQL's notifications for the waiters of this process.

* The process has one channel, and one connection that listens to it for all its waiters, threads
  and coroutines. The thread reads from it while anybody waits, and for a minute afterwards.
* A pooler may accept LISTEN and deliver nothing. So the connection counts as listening only after
  a test notification has arrived, which this process sends through an ordinary connection.
* After some time without notifications, the connection is tested in the same way.
* If anything fails, the waiters poll, and the thread tries again after a pause.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable
from typing import Any

from ... import clock
from ...log import logger
from ...process.points import reached
from ..shared.waiting import POLL_INTERVAL, ThreadEvent
from .listen_connection import Alarm, ListeningConnection, Stopped
from .pending_notification import NotifiedWaiters
from .sessions import SessionProof

SILENCE = 10.0
"""Seconds without a notification after which the connection is tested, if anybody waits."""
LOOK_EVERY = 0.5
"""Seconds between two checks whether the watched processes are dead."""
ECHO_PATIENCE = 2.0
"""Seconds within which a test notification must arrive."""
RETRY = 0.1, 30.0
"""Seconds before another attempt to listen after a failure: at first, and at most."""


class _NotDelivered(Exception):
    """A test notification has not arrived."""


class Listener:
    """Listens for the waiters while there are any; see ``Wakeup`` for the arguments."""

    def __init__(
        self,
        waiters: NotifiedWaiters,
        open_connection: Callable[[], Any],
        probe: Callable[[str, str], object],
        session: SessionProof | None,
        *,
        linger: float,
        test_again_after: float,
    ) -> None:
        self._waiters = waiters
        self._open_connection, self._probe, self._session = open_connection, probe, session
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
        self._connection, self._alarm, self._stop = None, None, ThreadEvent()
        self._thread: dict[str, threading.Thread] = {}
        self._began_at = self._try_at = float("-inf")
        self._failures, self._missing = 0, ""

    def close(self) -> None:
        """Stop listening until somebody waits again."""
        thread, alarm = self._thread.pop("", None), self._alarm
        self._stop.set()
        if alarm is not None:
            alarm.set()
        if thread not in (None, threading.current_thread()):
            thread.join(ECHO_PATIENCE)

    def ensure_running(self) -> None:
        """Start the thread if there is none; waiters poll if it cannot start."""
        if self._thread:
            return
        thread = threading.Thread(target=self._run, name="dlock-listener-postgresql", daemon=True)
        try:
            # Stored before it starts, so that two waiters start only one thread.
            if self._thread.setdefault("", thread) is thread:
                thread.start()
        except BaseException as error:
            self._end_thread(thread)
            # No thread can start, for instance while the interpreter shuts down.
            if not isinstance(error, RuntimeError):
                raise

    def _end_thread(self, thread: threading.Thread) -> None:
        if self._thread.get("") is thread:
            self._thread.pop("", None)

    # -- on the thread -----------------------------------------------------------------

    def _run(self) -> None:
        me = threading.current_thread()
        self._stop = stop = ThreadEvent()
        try:
            while self._is_needed(me):
                if (now := clock.now()) < self._try_at:
                    stop.sleep(min(self._try_at, now + LOOK_EVERY))
                    continue
                try:
                    self._listen(me)
                except Exception:
                    logger.exception("The thread that listens for released locks met an error")
        finally:
            self._end_thread(me)
            # A waiter that came meanwhile saw this thread and started none.
            if self._waiters.by_owner:
                self.ensure_running()

    def _is_needed(self, me: threading.Thread) -> bool:
        return self._waiters.are_needed(self._linger) and self._thread.get("") is me

    def _listen(self, me: threading.Thread) -> None:
        """Listen until nobody waits any more, ``close`` is called, or anything fails."""
        self._began_at = clock.now()
        try:
            self._alarm = Alarm()
            connection = ListeningConnection(self._open_connection, self.channel, self._alarm)
            self._connection = connection
            self._test(connection)
            if self._session is not None:
                self._session.take(connection)
            self._waiters.change(subscribed=True, works=True)
            reached("listener.listening", store="postgresql")
            self._read(connection, me)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - nobody else could handle it
            self._failed(error)
        finally:
            # Whatever comes now, the waiters must not rely on notifications any more.
            if self._waiters.subscribed:
                self._waiters.change(subscribed=False, works=True)
            self._withdraw()
            opened, self._connection = self._connection, None
            if opened is not None:
                opened.close()
            alarm, self._alarm = self._alarm, None
            if alarm is not None:
                alarm.close()

    def _withdraw(self) -> None:
        if self._session is not None:
            try:
                self._session.withdraw()
            except Exception:  # noqa: BLE001 - see below
                # The claim still stands, so the session must be opened again.
                self._waiters.needed_at = clock.now()

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
            elif self._waiters.by_owner and clock.now() - heard_at >= SILENCE:
                self._test(connection)
                heard_at = clock.now()

    def _test(self, connection: ListeningConnection) -> None:
        """Raise unless a test notification arrives."""
        # The payload has no ticket, so no waiter gets it.
        self._missing = f" {secrets.token_hex(4)}"
        self._probe(self.channel, self._missing)
        give_up_at = clock.now() + ECHO_PATIENCE
        while self._missing:
            if (left := give_up_at - clock.now()) <= 0.0:
                raise _NotDelivered("notifications from PostgreSQL do not arrive")
            self._deliver(connection.read(left))
        reached("listener.tested", store="postgresql")

    def _deliver(self, payloads: list[str]) -> None:
        for payload in payloads:
            if not payload.startswith(" "):
                self._waiters.deliver(payload)
            elif payload == self._missing:
                # Others come from an earlier test, or from a stranger.
                self._missing = ""

    def _failed(self, error: Exception) -> None:
        subscribed, worked = self._waiters.subscribed, self._waiters.works
        if clock.now() - self._began_at > SILENCE:
            self._failures = 0
        pause = min(RETRY[0] * 2**self._failures, RETRY[1]) * random.uniform(0.5, 1.0)
        self._failures = min(self._failures + 1, 10)
        if not subscribed and isinstance(error, _NotDelivered):
            pause = self._test_again_after
        self._try_at = clock.now() + pause
        # A broken connection alone is no reason to expect the next attempt to fail.
        self._waiters.change(subscribed=False, works=subscribed)
        reached("listener.failed", store="postgresql")
        if worked and not subscribed:
            logger.warning(
                "Not listening for released locks; waiters poll every %s to %s s: %s",
                *POLL_INTERVAL,
                error,
            )
