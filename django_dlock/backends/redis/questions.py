"""What operators ask of the server itself: what is wrong with it, and what it says of itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from ...process import current
from ..base import BaseLockBackend, Fact, Problem
from . import config, information
from .commands import Commands, text
from .config import RedisOptions
from .connection import FAILURES, Connection, ErrorReply
from .handover import REFUSED, HandoverListener
from .pool import Pool
from .processes import read_processes


class ServerQuestions(BaseLockBackend):
    """The part of the backend that asks the server, and not about locks."""

    _commands: Commands
    _listener: HandoverListener
    _pool: Pool
    _own: RedisOptions

    def _ask(self, *command: Any) -> Any:
        raise NotImplementedError

    def _unavailable(self, error: BaseException, name: str = "") -> NoReturn:
        raise NotImplementedError

    def store_problems(self) -> list[Problem]:
        deadline = self.call_deadline()
        with self._asking(deadline) as connection:
            values = self._information(connection, deadline)
            confirms = not self._own.replicas or (
                self._refusable(connection, "WAIT", 0, 1, deadline=deadline) is not None
            )
            refused = self._listener.refusal(connection, deadline)
            if not refused:
                # As long as the connection is open, it is subscribed.
                (me,) = read_processes(self._ask, self._commands.keys, [current().id]).values()
                refused = "" if me.listeners else "it counts no subscribers"
        found = config.store_problems(self.alias, values, refused, self._commands.keys.channels)
        if not confirms:
            found.append(information.no_confirmation(self.alias))
        elif values:
            online = information.online_replicas(values)
            found += config.replica_problems(self.alias, online, self._own.replicas)
        return found

    def run_id(self, *, deadline: float) -> str:
        """Which process the server is; empty if it does not tell."""
        with self._asking(deadline) as connection:
            return self._information(connection, deadline).get("run_id", "")

    def uptime(self, *, deadline: float) -> float | None:
        """Seconds since the server was started; ``None`` if it does not tell."""
        with self._asking(deadline) as connection:
            text = self._information(connection, deadline).get("uptime_in_seconds", "")
        return float(text) if text.isdecimal() else None

    def facts(self, *, deadline: float) -> list[Fact]:
        with self._asking(deadline) as connection:
            values = self._information(connection, deadline)
            saves = self._refusable(connection, "CONFIG", "GET", "save", deadline=deadline)
        # The reply is the name of the setting, then its value.
        snapshots = None if saves is None else any(map(text, list(saves)[1:]))
        return information.facts_of(values, snapshots, self._own.max_connections)

    @contextlib.contextmanager
    def _asking(self, deadline: float) -> Iterator[Connection]:
        """A connection of its own to the server that has the locks."""
        # In a cluster, this leads to the node that has them.
        self.locked("check", deadline=deadline)
        try:
            connection = self._pool.connect(deadline)
            try:
                yield connection
            finally:
                connection.close()
        except FAILURES as error:
            self._unavailable(error)

    def _information(self, connection: Connection, deadline: float) -> dict[str, str]:
        """The answer to ``INFO``; empty if the user may not ask. Hosted servers refuse ``CONFIG``,
        but not this."""
        answer = self._refusable(connection, "INFO", deadline=deadline)
        return {} if answer is None else information.parsed(text(answer))

    @staticmethod
    def _refusable(connection: Connection, *words: str | int, deadline: float) -> Any:
        """The reply to a command; ``None`` if the user may not use it, or the server lacks it."""
        try:
            return connection.execute(*words, deadline=deadline)
        except ErrorReply as error:
            if error.code in REFUSED:
                return None
            raise
