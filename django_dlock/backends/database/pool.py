"""A limited number of connections, shared by the threads of this process; calls have deadlines.

Of ``limit`` connections, one is reserved for renewals and one for calls that end a lease, so that
neither waits behind acquires. The rules are those of ``backends/shared/pool.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NoReturn, TypeVar, get_args

from ... import clock
from ..shared.pool import ConnectionPool, Verdict
from .connection import Connection, Failure, connect_failure
from .deadlines import deadlines

T = TypeVar("T")

Urgency = Literal["ordinary", "end", "renew"]
"""``ordinary`` is anything but ending a lease or renewing leases. The most urgent is last."""
URGENCIES: dict[str, int] = {name: number for number, name in enumerate(get_args(Urgency))}
REPEATABLE = ("broken", "overtaken", "transient", "read-only")
"""Kinds of failures after which a call may succeed if it is repeated."""


class Pool(ConnectionPool[Connection]):
    """At most ``limit`` connections; further callers wait their turn."""

    failures = (Failure,)

    def __init__(self, make: Callable[[], Connection], limit: int) -> None:
        super().__init__(partial(_connect, make), limit - 2, 1, 1)

    def forget(self) -> None:
        """Leave all connections to the parent; called in a forked child."""
        for connection in self.idle.drop_all():
            connection.leave_to_parent()
        super().forget()

    def run(self, use: Callable[[Connection], T], deadline: float, urgency: Urgency) -> T:
        """As ``call``, with the urgency's name.

        Raises:
            Failure: No answer, or a refusal.
            NoSlot: No connection was free in time.
        """

        def use_in_time(connection: Connection) -> T:
            connection.deadline = deadline
            deadlines.begin(connection, deadline)
            try:
                return use(connection)
            finally:
                connection.is_reusable = deadlines.end(connection)

        return self.call(use_in_time, deadline, URGENCIES[urgency])

    def judge(self, error: Failure, deadline: float) -> Verdict:
        # A server may have become a standby; a new connection may lead to the new primary.
        return Verdict(
            repeats=error.kind in REPEATABLE and not error.obstacle,
            broken=error.kind in ("broken", "read-only"),
            silent=error.kind == "broken" and clock.now() >= deadline,
            telling=error.kind == "read-only",
        )

    def _too_slow(self) -> NoReturn:
        raise Failure("broken", TimeoutError("no connection within the time allowed"))


def _connect(make: Callable[[], Connection]) -> Connection:
    try:
        return make()
    except Failure:
        raise
    except Exception as error:
        raise connect_failure(error) from error
