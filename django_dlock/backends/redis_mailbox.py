"""Where the waiters of this process hear of what is handed over to them.

The protocol, for threads here and for coroutines elsewhere; ``redis_lua.py`` tells what the
server does:

* A listener has a channel of its own, ``Keys.mailbox``, subscribed to on one connection for all
  its waiters. Every acquire of a waiter names it.
* A letter is worth something only to one whose ask was sent while the subscription stood: an
  earlier one may have been registered and skipped. So the first wait subscribes and has its caller
  ask again, as does every wait after a cut. Letters that come between a caller's ask and its wait
  are kept.
* A letter is believed if its token is higher than that of the lease which the ask met
  (``Contention.token``): an older one is of a grant before that ask, which was broken or is over.
* A lease that is handed over counts from when that ask was *sent*, like every lease: no clock of
  the server decides for the holder. ``Commands.handed`` gives it where that leaves the holder at
  least half of what was handed over; else the caller asks again, finds its own grant and prolongs
  it to the full TTL. So it does with a lease that is not renewed in the background.
* Every waiter asks again after some seconds at the latest, whatever it hears: letters may be lost.
* A connection on which nothing was heard for a while must answer a PING.

Among threads the waiter that comes first leads: it reads the socket itself, so that a lone waiter
is woken by nobody but the system. It hands letters of others to them, and the lead to another when
it leaves. Whatever strikes it while it reads counts as a cut: nobody reads half a letter.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from redis import exceptions as errors

from .. import clock
from ..lease import Contention
from .redis_commands import Keys, Letter, read_letter
from .redis_connections import CUT, RedisConnections
from .redis_ear import Ear

__all__ = [
    "ASK_EVERY",
    "FIRST_ASK",
    "KEPT_FOR",
    "SILENCE",
    "SOON",
    "Mailbox",
    "asks_again_at",
    "numbers",
]

LONGEST_BLOCK = 3.0
"""Seconds after which a waiter asks again although it heard nothing."""
SHORTEST_BLOCK = 0.05
FIRST_ASK, ASK_EVERY = 0.05, 0.5
"""Seconds after which a waiter asks whether it is interrupted, and again."""
SILENCE = 10.0
"""Seconds without a word after which the connection must show that it lives."""
KEPT_FOR = 5.0
"""Seconds for which a letter is kept whose addressee does not wait at the moment."""
SOON = 0.1
"""Seconds after its subscription within which a cut may be no accident."""

numbers = itertools.count(1)
"""Of the mailboxes of this process."""


def asks_again_at(met: Contention) -> float:
    """When a waiter that hears nothing asks again: by then the lease may have ended."""
    return clock.now() + max(SHORTEST_BLOCK, min(met.remaining + 0.002, LONGEST_BLOCK))


class _Waiter:
    """One thread in ``Mailbox.wait``."""

    __slots__ = ("bell", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        # A bare lock that is held until somebody rings: an interrupt can leave an Event's own
        # lock held for ever.
        self.bell = threading.Lock()
        self.bell.acquire()

    def ring(self) -> None:
        try:
            self.bell.release()
        except RuntimeError:
            pass  # It rings already.


class Mailbox:
    """The mailbox of all threads of this process on one server.

    Every step upon a dictionary is atomic by itself, so that no lock can be left held by a fork, a
    signal handler or a finalizer.
    """

    def __init__(self, connections: RedisConnections, keys: Keys, timeout: float) -> None:
        self._connections, self._keys, self._timeout = connections, keys, timeout
        self.number = next(numbers)
        self.forget()

    def forget(self) -> None:
        """Drop everything without a word to the server, whose session is the parent's."""
        self._ear: Ear | None = None
        self._waiting: dict[str, _Waiter] = {}
        self._letters: dict[str, Letter] = {}
        self._lead: dict[str, _Waiter] = {}
        self._subscribed_at = self._heard_at = self._pinged_at = 0.0
        self._breaks = 0

    def close(self) -> None:
        """Close the connection unless somebody reads it."""
        nobody = _Waiter("")
        try:
            if self._lead.setdefault("", nobody) is nobody:
                self._drop(self._ear)
        finally:
            self._leave(nobody)

    @property
    def address(self) -> str:
        return self._keys.mailbox(self.number)

    def wait(
        self,
        owner: str,
        met: Contention,
        *,
        until: float,
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> Letter | None:
        """Block until a letter comes; ``None`` where the owner had better ask again.

        Raises:
            redis.exceptions.RedisError, OSError: The server cannot be listened to.
        """
        waiter = _Waiter(owner)
        try:
            try:
                self._waiting[owner] = waiter
                return self._wait(waiter, met, until, deadline, interrupted)
            finally:
                self._leave(waiter)
        except BaseException:
            # Which may have struck while it left.
            self._leave(waiter)
            raise

    def _wait(
        self,
        waiter: _Waiter,
        met: Contention,
        until: float,
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> Letter | None:
        # Not at once: a hand-over is faster than a look at the holder's process.
        ask_at = clock.now() + FIRST_ASK
        while True:
            # Before the letter is looked for: whoever reads it next rings.
            listening = self._ear is not None
            letter = self._letters.pop(waiter.owner, None)
            if letter is not None and (not letter.token or letter.token > met.token):
                return letter
            if listening and met.asked_at <= self._subscribed_at:
                return None
            now = clock.now()
            if now >= until:
                return None
            if now >= ask_at:
                if interrupted():
                    return None
                ask_at = now + ASK_EVERY
            turn = min(until, ask_at)
            if self._lead.setdefault("", waiter) is not waiter:
                waiter.bell.acquire(timeout=turn - now)
            elif listening:
                if not self._listen(turn):
                    return None
            else:
                self._subscribe(deadline)

    def _leave(self, waiter: _Waiter) -> None:
        """Wait no more, and see to it that somebody leads; twice does no harm."""
        if self._waiting.get(waiter.owner) is waiter:
            self._waiting.pop(waiter.owner, None)
        if self._lead.get("") is waiter:
            self._lead.pop("", None)
        # Whether or not it led: it may have been chosen by one who left at the same time.
        if self._waiting and not self._lead:
            for other in self._waiting.copy().values():
                other.ring()
                break

    # -- as the leader -----------------------------------------------------------------

    def _subscribe(self, deadline: float) -> None:
        deadline = min(deadline, clock.now() + self._timeout)
        connection = self._connections.connect(deadline)
        try:
            connection.send_command("SUBSCRIBE", self.address)
            self._connections.read(connection, deadline)
        except BaseException:
            connection.disconnect()
            raise
        # Not before it stands.
        self._subscribed_at = self._heard_at = clock.now()
        self._pinged_at = 0.0
        self._ear = Ear(connection, self.address)
        self._ring_all()

    def _listen(self, until: float) -> bool:
        """Read letters, or none until then; false where the connection is lost."""
        ear = self._ear
        if ear is None:
            return False
        try:
            self._ask_for_life(ear)
            letters = ear.hear(until - clock.now())
            if letters is None:
                self._see_that_it_lives()
                return True
            self._heard_at, self._pinged_at = clock.now(), 0.0
            for letter in letters:
                self._deliver(letter)
        except (*CUT, errors.TimeoutError):
            self._drop(ear)
            soon = clock.now() - self._subscribed_at < SOON
            self._breaks = self._breaks + 1 if soon else 0
            # A third in a row is no accident, and asking again would be a loop without a pause.
            if self._breaks == 3:
                self._breaks = 0
                raise
            return False
        except BaseException:
            # An interrupt, too: letters may be lost, those of others among them.
            self._drop(ear)
            raise
        return True

    def _ask_for_life(self, ear: Ear) -> None:
        now = clock.now()
        if not self._pinged_at and now - self._heard_at > SILENCE:
            self._pinged_at = now
            ear.connection.send_command("PING")

    def _see_that_it_lives(self) -> None:
        """Where nothing was to be read just now, for the time alone would not tell.

        Raises:
            redis.exceptions.TimeoutError: A PING was not answered.
        """
        if self._pinged_at and clock.now() - self._pinged_at > self._timeout:
            raise errors.TimeoutError("no answer to a PING")

    def _deliver(self, message: bytes) -> None:
        read = read_letter(message)
        if read is None:
            return
        owner, letter = read
        if self._letters:
            for other, kept in self._letters.copy().items():
                if letter.read_at - kept.read_at > KEPT_FOR:
                    self._letters.pop(other, None)
        # First the letter: one who comes to wait now looks for it.
        self._letters[owner] = letter
        waiter = self._waiting.get(owner)
        if waiter is not None:
            waiter.ring()

    def _drop(self, ear: Ear | None) -> None:
        if ear is None:
            return
        if self._ear is ear:
            self._ear = None
        ear.connection.disconnect()
        self._ring_all()

    def _ring_all(self) -> None:
        for waiter in self._waiting.copy().values():
            waiter.ring()
