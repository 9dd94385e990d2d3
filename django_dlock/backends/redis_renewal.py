"""A renewal that is sent on one of our connections and read later."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from redis import exceptions as errors

from .. import clock
from .base import Fates, PendingRenewal
from .redis_commands import Command
from .redis_connections import CUT, FAILURES, Place, RedisConnections

__all__ = ["SentRenewal"]

AT_ONCE = 0.001
"""Seconds to send what a socket takes; 0 would be another mode, which TLS has no use for."""


class SentRenewal:
    """A renewal that is on its way on a connection of ours; a thread repeats it if that breaks.

    500 leases are more than a socket's buffer is sure to take: the rest is sent when it is looked
    at again, so that a server that reads nothing keeps nobody waiting.
    """

    def __init__(
        self,
        connections: RedisConnections,
        place: Place,
        command: Command[Fates],
        deadline: float,
        *,
        repeat: Callable[[], PendingRenewal],
        unavailable: Callable[[BaseException], NoReturn],
    ) -> None:
        self._connections, self._deadline = connections, deadline
        self._place: Place | None = place
        # Out of its place, so that nothing that goes wrong can bring it back there.
        self._connection, place.connection = place.connection, None
        self._read_answer = command.read
        self._repeat, self._unavailable = repeat, unavailable
        self._repeated: PendingRenewal | None = None
        self._fates: Fates | None = None
        self._error: BaseException | None = None
        self._unsent = memoryview(command.packed)
        self._send(clock.now() + AT_ONCE)

    def wait(self, timeout: float) -> bool:
        until = clock.now() + timeout
        if not self._settled():
            if not self._send(until):
                return False
            try:
                left = max(0.0, until - clock.now())
                if self._repeated is None and not self._connection.can_read(timeout=left):
                    return False
            except FAILURES:
                pass  # The reading meets the same break.
            self._read()
        # Not left to ``result``, which must not block once this has said that it will not.
        if self._repeated is not None:
            return self._repeated.wait(max(0.0, until - clock.now()))
        return True

    def result(self) -> Fates:
        if not self._settled():
            if not self._send(self._deadline):
                self._drop()
                self._error = errors.TimeoutError("not sent within the time allowed")
            self._read()
        if self._repeated is not None:
            return self._repeated.result()
        if self._error is not None:
            self._unavailable(self._error)
        return self._fates or []

    def abandon(self) -> None:
        if self._repeated is not None:
            self._repeated.abandon()
        elif not self._settled():
            self._drop()

    def _settled(self) -> bool:
        outcomes = (self._fates, self._error, self._repeated)
        return any(outcome is not None for outcome in outcomes)

    def _send(self, until: float) -> bool:
        """Send what the socket takes; whether that was all, or another way was taken."""
        if not self._unsent:
            return True
        # Not a part of redis-py's public face, which can only send all and wait for it.
        sock = getattr(self._connection, "_sock", None)
        if sock is None:
            self._give_up()
            return True
        usual = sock.gettimeout()
        try:
            while self._unsent:
                sock.settimeout(max(AT_ONCE, until - clock.now()))
                self._unsent = self._unsent[sock.send(self._unsent) :]
            sock.settimeout(usual)
        except TimeoutError:
            sock.settimeout(usual)
            return False
        except FAILURES:
            self._give_up()
        except BaseException:
            self._drop()
            raise
        return True

    def _give_up(self) -> None:
        self._drop()
        self._repeated = self._repeat()

    def _read(self) -> None:
        if self._settled():
            return
        try:
            # In most cases it was seen already, and then redis-py may have it and not the socket.
            answer = self._connections.read_any(self._connection, self._deadline)
        except (*CUT, errors.NoScriptError):
            self._give_up()
        except FAILURES as error:
            self._drop()
            self._error = error
        except BaseException:
            self._drop()
            raise
        else:
            self._keep()
            self._fates = self._read_answer(answer, 0.0)

    def _keep(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.connection = self._connection
            self._connections.give_back(place)

    def _drop(self) -> None:
        """Let go of a connection that may owe a reply, once."""
        place, self._place = self._place, None
        if place is not None:
            self._connections.give_back(place)
            self._connection.disconnect()
