"""A renewal that is sent on one of our connections and read later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from redis import exceptions as errors

from .. import clock
from .base import Fates, PendingRenewal
from .redis_connections import CUT, FAILURES, RedisConnections

__all__ = ["SentRenewal"]


class SentRenewal:
    """A renewal that is on its way on a connection of ours; a thread repeats it if that breaks."""

    def __init__(
        self,
        connections: RedisConnections,
        connection: Any,
        deadline: float,
        *,
        read: Callable[[Any, float], Fates],
        repeat: Callable[[], PendingRenewal],
        unavailable: Callable[[BaseException], NoReturn],
    ) -> None:
        self._connections, self._connection, self._deadline = connections, connection, deadline
        self._read_answer = read
        self._repeat, self._unavailable = repeat, unavailable
        self._repeated: PendingRenewal | None = None
        self._fates: Fates | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: float) -> bool:
        until = clock.now() + timeout
        if not self._settled():
            try:
                if not self._connection.can_read(timeout=timeout):
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
            self._connection.disconnect()

    def _settled(self) -> bool:
        outcomes = (self._fates, self._error, self._repeated)
        return any(outcome is not None for outcome in outcomes)

    def _read(self) -> None:
        try:
            answer = self._connections.read(self._connection, self._deadline)
        except (*CUT, errors.NoScriptError):
            self._connection.disconnect()
            self._repeated = self._repeat()
        except FAILURES as error:
            self._connection.disconnect()
            self._error = error
        except BaseException:
            self._connection.disconnect()
            raise
        else:
            self._connections.give_back(self._connection)
            self._fates = self._read_answer(answer, 0.0)
