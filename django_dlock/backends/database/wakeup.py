"""Wakes the waiters of this process by PostgreSQL's notifications.

* A waiter registers its pending notification before it stores its ticket in the table, so that
  none is lost in between. One that arrives before ``wait`` is kept; see ``pending_notification``.
* A thread receives the notifications of all waiters on one connection; see ``listener``.
* A notification may be lost before this process listens and while the connection is cut. So each
  waiter is woken and asks again when listening begins, ends or fails. While nothing listens,
  waiters ask again every few tenths of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import clock
from .listener import Listener
from .pending_notification import NotifiedWaiters, PendingNotification
from .sessions import SessionProof


class Wakeup:
    """Wakes all waiters of this process for one database.

    Args:
        open_connection: Returns a new connection of psycopg 3 or psycopg 2 in autocommit mode, and
            never hangs.
        probe: Sends a notification (channel, payload) through an ordinary connection, and never
            hangs.
        session: Proves to other processes that this one lives, and finds out which others are dead.
        linger: Seconds for which the connection stays open after the last waiter has left.
        test_again_after: Seconds after which notifications are tested again.
    """

    def __init__(
        self,
        open_connection: Callable[[], Any],
        probe: Callable[[str, str], object],
        *,
        session: SessionProof | None = None,
        linger: float = 60.0,
        test_again_after: float = 60.0,
    ) -> None:
        self._waiters = NotifiedWaiters(self._ensure_listening)
        self._listener = Listener(
            self._waiters,
            open_connection,
            probe,
            session,
            linger=linger,
            test_again_after=test_again_after,
        )

    def _ensure_listening(self) -> None:
        self._listener.ensure_running()

    def forget(self) -> None:
        """Reset in a forked child; send nothing on the connection, which belongs to the parent."""
        self._waiters.forget()
        self._listener.forget()

    def close(self) -> None:
        """Stop listening until somebody waits again."""
        self._listener.close()

    @property
    def channel(self) -> str:
        """The channel of this process, for ``pg_notify``."""
        return self._listener.channel

    @property
    def subscribed(self) -> bool:
        """Whether a notification sent now will arrive, as far as is known."""
        return self._waiters.subscribed

    @property
    def works(self) -> bool:
        """False if listening has failed, or a pooler drops notifications."""
        return self._waiters.works

    def keep_listening(self) -> None:
        """Listen for a while, even if nobody waits; never blocks."""
        self._waiters.needed_at = clock.now()
        self._listener.ensure_running()

    def pending(self, owner: str) -> PendingNotification:
        """The pending notification of a waiter.

        Args:
            owner: First word of the payload; unique to the waiter.
        """
        return PendingNotification(self._waiters, owner, self.channel)
