"""Keeps what this process knows about the active store up to date, on a thread of its own.

The thread starts with the first use, and ends when the backend has not been used for a minute. It
has its own connection to the database, so a transaction of the caller changes nothing. No thread
that uses locks waits for the database while the last answer is valid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.db import Error

from ... import clock, process
from ...databases.errors import TablesMissing, explained, migrate_command
from ...exceptions import BackendUnavailable
from ...log import logger
from ...process.points import reached
from .own_connection import OwnConnection
from .rules import View

IDLE = 60.0
"""Seconds without use after which the thread ends."""
PAUSE_AFTER_FAILURE = 0.1
READ_PATIENCE, AFTER_PATIENCE = 4.0, 10.0
"""Seconds for a read, and for what is written after it, before the connection is given up."""
HANGING_AFTER = 5.0
"""Seconds after which another thread reads in place of one that hangs nevertheless, for instance
because a name server does not answer."""
CLOSE_PATIENCE = 1.0
SOON_REPLACED, LATER_AFTER = 4, 10.0
"""After this many threads that hang, another one is started only now and then."""


class ViewRefresher:
    """Reads the view again and again, so that it stays valid.

    Args:
        read: Reads it from the database.
        after: Is called after each read, on the same thread, with the view.
        after_asks: Seconds for which it may ask others than the database.
        interval: Seconds between two reads.
        database: Returns the alias in ``DATABASES`` whose connection is closed at the end.

    Attributes:
        last: What was read last, valid or not.
    """

    def __init__(
        self,
        alias: str,
        read: Callable[[], View],
        after: Callable[[View], object],
        interval: float,
        database: Callable[[], str],
        *,
        after_asks: float,
    ) -> None:
        self._alias, self._read, self._after = alias, read, after
        self._after_asks = after_asks
        self._interval, self._database = interval, database
        self.last: View | None = None
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, which does not have the thread."""
        # Reentrant: a signal handler may come here while its own thread is inside.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # The thread that reads now, as opposed to those that hang.
        self._thread: threading.Thread | None = None
        self._hanging = set[threading.Thread]()
        self._began_at = self._used_at = clock.now()
        self._wanted = False
        self._error: Exception | None = None

    def close(self) -> None:
        """End the thread, and so close its connection; the next use starts another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_PATIENCE)

    def valid(self, margin: float = 0.0) -> View | None:
        """The last view, if it stays valid for ``margin`` seconds; never waits."""
        view, now = self.last, clock.now()
        self._used_at = now
        if self._thread is None:
            with self._lock:
                self._start()
        return view if view is not None and now + margin < view.valid_until else None

    def current(self, deadline: float) -> View:
        """A valid view; reads it if necessary.

        Raises:
            BackendUnavailable: The database did not answer in time.
        """
        view = self.valid()
        if view is not None:
            return view
        with self._lock:
            while True:
                view, now = self.last, clock.now()
                if view is not None and now < view.valid_until:
                    return view
                if now >= deadline:
                    raise self._unavailable()
                self._start()
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait(min(deadline - now, HANGING_AFTER))

    def refresh(self) -> None:
        """Read again as soon as possible; does not wait for it."""
        with self._lock:
            self._start()
            self._wanted = True
            self._changed.notify_all()

    def _unavailable(self) -> BackendUnavailable:
        database, cause = self._database(), self._error
        if isinstance(cause, Error):
            cause = explained(cause, database)
        why = f": {cause}" if cause is not None else " within the time allowed"
        text = f"The database {database!r} did not say which store is active{why}"
        error = BackendUnavailable(text, "", self._alias)
        if isinstance(cause, TablesMissing):
            error.cure = f"Run {migrate_command(database)}."
        error.__cause__ = self._error
        return error

    # -- the thread --------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            patience = HANGING_AFTER if len(self._hanging) < SOON_REPLACED else LATER_AFTER
            if not self._wanted or clock.now() - self._began_at < patience:
                return
            self._hanging.add(self._thread)
        self._began_at = clock.now()
        self._thread = threading.Thread(target=self._run, name="dlock-failover", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # No thread can start while the interpreter ends.
            self._thread = None

    def _run(self) -> None:
        mine, own = threading.current_thread(), OwnConnection(self._database)
        try:
            while self._serve(mine, own):
                pass
        finally:
            with self._lock:
                self._hanging.discard(mine)
                if self._thread is mine:
                    self._thread = None
                    # A caller that came since the last read starts another thread.
                    self._changed.notify_all()
            own.close()
            process.thread_ends()

    def _serve(self, mine: threading.Thread, own: OwnConnection) -> bool:
        """Read once, and pause; returns whether to go on."""
        with self._lock:
            if self._thread is not mine:
                return False
            self._began_at, self._wanted = clock.now(), False
        view, error = None, None
        try:
            with own.until(clock.now() + READ_PATIENCE):
                view = self._read()
        except Exception as failure:  # noqa: BLE001 - told to those who wait for the view
            error = failure
            own.close()
        with self._lock:
            if self._thread is not mine:
                # It hung, and another thread reads.
                return False
            self._error = error
            if view is not None and (self.last is None or view.valid_until > self.last.valid_until):
                self.last = view
            self._changed.notify_all()
        reached("view.read", alias=self._alias, view=self.last, error=error)
        if view is not None:
            try:
                with own.until(clock.now() + AFTER_PATIENCE + self._after_asks):
                    self._after(view)
            except Exception:
                logger.exception(
                    "Alias %r: the fail-over backend failed", self._alias, alias=self._alias
                )
                own.close()
        pause = self._interval if error is None else PAUSE_AFTER_FAILURE
        until = clock.now() + pause
        with self._lock:
            while (left := until - clock.now()) > 0 and self._thread is mine:
                if error is None and self._wanted:
                    break
                self._changed.wait(left)
            return self._thread is mine and clock.now() - self._used_at < IDLE
