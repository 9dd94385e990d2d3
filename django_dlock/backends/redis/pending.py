"""Renewals that are sent now and answered later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from redis import exceptions as errors

from ... import clock
from ...exceptions import BackendUnavailable
from ..base import PendingRenewal, RenewalResults
from ..slots import Slot
from .commands import Command
from .connection import FAILURES, Connection, ConnectionBroken, ErrorReply
from .pool import Pool


class PendingReply:
    """A ``PendingRenewal`` on a connection of the pool. Never waits longer than it is told to.

    Args:
        taken: What ``Pool.take_idle`` returned.
        repeat: Starts the renewal again after any error, without waiting.
    """

    def __init__(
        self,
        pool: Pool,
        taken: tuple[Slot, Connection],
        command: Command[RenewalResults],
        deadline: float,
        *,
        repeat: Callable[[], PendingRenewal],
    ) -> None:
        self._pool, self._command, self._deadline = pool, command, deadline
        self._repeat = repeat
        self._taken: tuple[Slot, Connection] | None = taken
        self._connection = taken[1]
        self._results: RenewalResults | None = None
        self._repeated: PendingRenewal | None = None
        self._sent_at = clock.now()
        # ``read`` raises the same failure again.
        with contextlib.suppress(*FAILURES):
            self._connection.send(command.packed)

    def wait(self, timeout: float) -> bool:
        until = clock.now() + timeout
        if self._taken is not None:
            self._read(until)
        if self._repeated is not None:
            return self._repeated.wait(max(0.0, until - clock.now()))
        return self._results is not None

    def result(self) -> RenewalResults:
        in_time = self.wait(max(0.0, self._deadline - clock.now()))
        if self._repeated is not None:
            return self._repeated.result()
        if not in_time or self._results is None:
            self.abandon()
            raise BackendUnavailable("Redis gave no answer: no reply within the time allowed")
        return self._results

    def abandon(self) -> None:
        if self._repeated is not None:
            self._repeated.abandon()
        elif self._taken is not None:
            self._pool.suspect(self._sent_at)
        self._let_go(close=True)

    def _read(self, until: float) -> None:
        try:
            if self._connection.was_left:
                raise ConnectionBroken("another server is the master now")
            reply = self._connection.read(until)
        except errors.TimeoutError:
            return
        except FAILURES as error:
            self._let_go(close=not isinstance(error, ErrorReply))
            self._repeated = self._repeat()
        except BaseException:
            self._let_go(close=True)
            raise
        else:
            self._let_go(close=False)
            self._results = self._command.read(reply, self._sent_at)

    def _let_go(self, *, close: bool) -> None:
        """Close the connection or return it to the pool; only the first call has an effect."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        if close:
            self._connection.close()
        else:
            self._pool.keep(self._connection)
        taken[0].release()
