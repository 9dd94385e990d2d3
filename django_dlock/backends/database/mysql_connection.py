"""A connection to MySQL or MariaDB through mysqlclient or PyMySQL.

**Deadlines.** On MariaDB each statement carries its own ``max_statement_time``. So when another
session keeps a row or the table locked, the server ends the statement at the call's deadline, and
executes nothing later. MySQL has no such limit for an UPDATE: there, the session's
``innodb_lock_wait_timeout`` ends the wait for a row, after the alias's ``command_timeout``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from ... import clock
from .connection import Connection, Failure
from .socket_handle import handle_of

SHORTEST = 0.001
"""Seconds; for the server, 0 would mean "without a limit"."""


class MySQLConnection(Connection):
    """See the module.

    Args:
        patience: Seconds for which a statement may wait for a row on MySQL.
    """

    def __init__(self, raw: Any, driver: Any, *, patience: int, **options: Any) -> None:
        super().__init__(raw, driver, **options)
        self._is_mariadb = "mariadb" in self.server.lower()
        if not self._is_mariadb:
            # A proxy may refuse it; then only the socket is shut down at the deadline.
            with contextlib.suppress(Failure):
                super()._execute(f"SET SESSION innodb_lock_wait_timeout = {patience}", ())

    @classmethod
    def of(cls, wrapper: Any, timeout: float) -> MySQLConnection:
        raw, driver = wrapper.connection, wrapper.Database
        return cls(raw, driver, patience=math.ceil(timeout), handle=handle_of(raw, driver))

    def _execute(self, statement: str, parameters: Sequence[Any]) -> None:
        if self._is_mariadb:
            patience = max(SHORTEST, self.deadline - clock.now())
            statement = f"SET STATEMENT max_statement_time = {patience:.3f} FOR {statement}"
        super()._execute(statement, parameters)
