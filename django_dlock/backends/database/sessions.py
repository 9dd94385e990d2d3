"""Proves by PostgreSQL's sessions that a process is dead, with ``OPTIONS["proof"]``.

* A process that listens takes an advisory lock in that session, which ends when the process does,
  and then claims so in the table of processes. A pooler that swallows notifications would keep the
  session, so there nothing is claimed.
* Waiters of other processes watch the process that holds their lock. Once a second, the thread
  that listens for them looks which of the processes watched claim a session that is gone.
* One that comes back takes the lock anew, or withdraws its claim, as soon as its connection is cut.
  So it counts as dead only if nothing has changed, heartbeats included, for ``GRACE`` seconds.
* A claim is void once the server has been started anew or a standby has been promoted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ... import clock
from ...process import ProcessIdentity, current
from .dialects import PROCESSES, PostgreSQL
from .listen_connection import ListeningConnection

__all__ = ["SessionProof"]

GRACE = 6.0
"""Seconds for which a session must have been gone without a sign of its process: longer than the
interval of its heartbeats, for a network may have cut the session of a process that lives."""
WATCHED_FOR = 3.0
"""Seconds for which a process is watched after somebody has asked for it."""
CLAIM_AGAIN = 3600.0
"""Seconds after which a claim is renewed, so that it is not deleted with old heartbeats."""

_STARTED_AT = "(extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint"
_CLAIM = f"('session:' || {{}} || ':' || {_STARTED_AT})"
TAKE = "SELECT pg_advisory_lock_shared(%s)"
CLAIM = (
    f"INSERT INTO {PROCESSES} (id, seen_at, gone) VALUES ({_CLAIM.format('%s')}, "
    f"{PostgreSQL.NOW}, false) ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at "
    "RETURNING seen_at"
)
WITHDRAW = f"DELETE FROM {PROCESSES} WHERE id LIKE 'session:' || %s || ':%%' RETURNING id"
LOOK = f"""
SELECT w.process, c.seen_at, b.seen_at
FROM unnest(%s::text[], %s::bigint[]) w (process, key)
JOIN {PROCESSES} c ON c.id = {_CLAIM.format("w.process")}
LEFT JOIN {PROCESSES} b ON b.id = w.process
WHERE w.key NOT IN (
  SELECT l.classid::bigint << 32 | l.objid::bigint FROM pg_locks l JOIN pg_database d
  ON d.oid = l.database WHERE d.datname = current_database() AND l.locktype = 'advisory'
  AND l.objsubid = 1
)"""
MARK = f"UPDATE {PROCESSES} SET gone = true WHERE id = %s AND seen_at = %s RETURNING id"

Facts = tuple[Any, ...]


class SessionProof:
    """What is known of the sessions of this process and of others.

    Every step upon a dictionary is atomic by itself; see ``Wakeup``.

    Args:
        ask: Executes a statement through an ordinary connection, and never hangs.
    """

    def __init__(self, ask: Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]) -> None:
        self._ask = ask
        self.forget()

    def forget(self) -> None:
        """Start anew in a forked child, which is another process."""
        self._watched: dict[str, float] = {}
        self._gone: dict[str, tuple[Facts, float]] = {}
        self._dead: dict[str, float] = {}
        self._claimed_at = float("-inf")

    # -- this process ------------------------------------------------------------------

    def take(self, connection: ListeningConnection) -> None:
        """Show by the connection that this process lives, and claim so."""
        connection.execute(TAKE, (_key(current().id),))
        self._claim()

    def withdraw(self) -> None:
        """Claim nothing any more: the session ends, but not the process."""
        if self._claimed_at > float("-inf"):
            self._ask(WITHDRAW, (current().id,))
            self._claimed_at = float("-inf")

    def _claim(self) -> None:
        self._claimed_at = clock.now()
        self._ask(CLAIM, (current().id,))

    # -- others ------------------------------------------------------------------------

    def is_dead(self, process: ProcessIdentity | None) -> bool:
        """Whether it is proven dead, as far as is known; costs no call. Watches it from now on."""
        if process is None:
            return False
        now = clock.now()
        self._watched[process.id] = now
        return now - self._dead.get(process.id, float("-inf")) < WATCHED_FOR

    def look(self) -> None:
        """Find out which of the processes watched are dead; where that fails, none is."""
        try:
            self._look(clock.now())
        except Exception:  # noqa: BLE001 - the next look may succeed
            self._gone.clear()

    def _look(self, now: float) -> None:
        if now - self._claimed_at > CLAIM_AGAIN:
            self._claim()
        for process, asked_at in self._watched.copy().items():
            if now - asked_at > WATCHED_FOR:
                self._watched.pop(process, None)
                self._gone.pop(process, None)
                self._dead.pop(process, None)
        watched = list(self._watched.copy())
        if not watched:
            return
        answer = self._ask(LOOK, (watched, [_key(process) for process in watched]))
        found = {process: tuple(facts) for process, *facts in answer}
        for process in watched:
            facts, since = self._gone.get(process, ((), now))
            if process not in found or found[process] != facts:
                self._dead.pop(process, None)
                self._gone[process] = found.get(process, ()), now
            elif now - since >= GRACE:
                if process not in self._dead:
                    # Whoever lists locks is told, too.
                    self._ask(MARK, (process, facts[-1]))
                self._dead[process] = now


def _key(process: str) -> int:
    digest = hashlib.blake2b(b"django-dlock" + process.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
