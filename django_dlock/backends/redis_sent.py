"""A command that is sent on one of our connections and whose answer is read later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NoReturn, Protocol, TypeVar

from redis import exceptions as errors

from .. import clock
from .redis_commands import Command
from .redis_connections import CUT, FAILURES, Place, RedisConnections

__all__ = ["Pending", "Repeated", "Sent"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

AT_ONCE = 0.001
"""Seconds to send what a socket takes; 0 would be another mode, which TLS has no use for."""


class Pending(Protocol[T_co]):
    """As ``base.PendingRenewal``, for any answer."""

    def wait(self, timeout: float) -> bool: ...

    def result(self) -> T_co: ...

    def abandon(self) -> None: ...


class Repeated(Generic[T]):
    """A command that is only carried out when its answer is wanted, which then is waited for."""

    def __init__(self, run: Callable[[], T]) -> None:
        self.result = run

    def wait(self, timeout: float) -> bool:
        return True

    def abandon(self) -> None:
        """It was not sent."""


class Sent(Generic[T]):
    """A command that is on its way on a connection of ours; it is repeated if that breaks.

    500 renewals are more than a socket's buffer is sure to take: the rest is sent when it is
    looked at again, so that a server that reads nothing keeps nobody waiting.

    Args:
        repeat: Another way to the answer.
    """

    def __init__(
        self,
        connections: RedisConnections,
        place: Place,
        command: Command[T],
        deadline: float,
        *,
        repeat: Callable[[], Pending[T]],
        unavailable: Callable[[BaseException], NoReturn],
    ) -> None:
        self._connections, self._deadline = connections, deadline
        self._place: Place | None = place
        # Out of its place, so that nothing that goes wrong can bring it back there.
        self._connection, place.connection = place.connection, None
        self._read_answer = command.read
        self._repeat, self._unavailable = repeat, unavailable
        self._repeated: Pending[T] | None = None
        self._answers: list[T] = []
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

    def result(self) -> T:
        if not self._settled():
            if not self._send(self._deadline):
                self._drop()
                self._error = errors.TimeoutError("not sent within the time allowed")
            self._read()
        if self._repeated is not None:
            return self._repeated.result()
        if self._error is not None:
            self._unavailable(self._error)
        return self._answers[0]

    def abandon(self) -> None:
        if self._repeated is not None:
            self._repeated.abandon()
        elif not self._settled():
            self._drop()

    def _settled(self) -> bool:
        return bool(self._answers) or self._error is not None or self._repeated is not None

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
        except errors.NoScriptError:
            self._keep()
            self._repeated = self._repeat()
        except CUT:
            self._give_up()
        except FAILURES as error:
            self._drop()
            self._error = error
        except BaseException:
            self._drop()
            raise
        else:
            self._keep()
            self._answers.append(self._read_answer(answer, 0.0))

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
