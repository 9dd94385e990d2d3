"""A connection to PostgreSQL through psycopg 3 or psycopg 2.

**Deadlines.** Each statement is sent with ``SET LOCAL statement_timeout``, in one message and so in
one transaction. So when another session keeps a row or the table locked, the server ends the
statement at the call's deadline, and executes nothing later. A pooler's sessions are not changed.
``lock_timeout`` would not do: it begins again with each lock, and a statement that waits for a row
behind another one waits for two.

**Prepared statements.** PostgreSQL needs longer to plan most of our statements than to execute
them. So the frequent ones are prepared, once in each session. Their names contain a digest of their
text, so a session that a pooler gives to another client can only have the same statement under the
same name. If it has none, or has it already, the client learns that from the error. Their plans use
the index even if the table is small, because a session keeps the plan when the table has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import clock
from .connection import Connection, Failure
from .prepared import Prepared
from .socket_handle import handle_of

BY_INDEX = "SET LOCAL enable_seqscan = off; "


class PostgreSQLConnection(Connection):
    """See the module.

    Args:
        prepares: Whether sessions may keep prepared statements.
    """

    def __init__(self, raw: Any, driver: Any, *, prepares: bool, **options: Any) -> None:
        super().__init__(raw, driver, **options)
        # It puts the parameters into the text, which may contain several statements only then.
        if (client_cursor := getattr(driver, "ClientCursor", None)) is not None:
            self._cursor = client_cursor(raw)
        self._has_results = client_cursor is not None
        self._prepares = prepares
        self._prepared: set[str] = set()

    @classmethod
    def of(cls, wrapper: Any, timeout: float) -> PostgreSQLConnection:
        # Django's setting for sites with a pooler that shares sessions.
        prepares = not wrapper.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        raw, driver = wrapper.connection, wrapper.Database
        return cls(raw, driver, prepares=prepares, handle=handle_of(raw, driver))

    def prepared(self, statement: Prepared, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        # With a pooler, the session may be another one each time.
        for _ in range(2 * self._prepares):
            is_new = statement.name not in self._prepared
            try:
                text = statement.prepare if is_new else statement.execute
                answer = self.rows(BY_INDEX + text, values)
            except Failure as error:
                if error.kind != "unprepared":
                    raise
                self._prepared.symmetric_difference_update([statement.name])
            else:
                self._prepared.add(statement.name)
                return answer
        return self.rows(statement.plain, statement.plain_values(values))

    def _execute(self, statement: str, parameters: Sequence[Any]) -> None:
        patience = max(1, round(1000 * (self.deadline - clock.now())))
        # As a parameter: psycopg remembers how it has parsed a text.
        super()._execute(f"SET LOCAL statement_timeout = %s; {statement}", [patience, *parameters])
        # psycopg 2 keeps the last result only.
        while self._has_results and self._cursor.nextset():
            pass
