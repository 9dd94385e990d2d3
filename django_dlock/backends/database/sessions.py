"""Uses PostgreSQL's sessions to prove that a process is dead, with ``OPTIONS["proof"]``.

* A process that listens takes an advisory lock in the listening session. That lock ends when the
  process does. The process then writes a claim into the table of processes. A pooler that drops
  notifications would keep the session open, so behind such a pooler a process claims nothing.
* Waiters of other processes watch the process that holds their lock. Twice a second, their
  listening thread checks which of the watched processes claim a session that is gone.
* After a cut connection, a living process takes the lock again or withdraws its claim. So it counts
  as dead only if nothing has changed, heartbeats included, for ``GRACE`` seconds.
* A claim is void once the server has restarted or a standby has been promoted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ... import clock
from ...process import ProcessIdentity, current
from .listen_connection import ListeningConnection
from .postgresql import PostgreSQL
from .statements import PROCESSES

GRACE = 6.0
"""Seconds for which a session must be gone, without a sign of its process. Longer than the
interval of heartbeats, because a network may cut the session of a living process."""
WATCHED_FOR = 3.0
"""Seconds for which a process is watched after the last question about it."""
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
FIND_DEAD = f"""
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
    """What is known about the sessions of this process and of others.

    Every operation on a dictionary here is atomic by itself; see ``Wakeup``.

    Args:
        ask: Executes a statement through an ordinary connection, and never hangs.
    """

    def __init__(self, ask: Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]) -> None:
        self._ask = ask
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, which is another process."""
        self._watched: dict[str, float] = {}
        self._gone: dict[str, tuple[Facts, float]] = {}
        self._dead: dict[str, float] = {}
        self._claimed_at = float("-inf")

    # -- this process ------------------------------------------------------------------

    def take(self, connection: ListeningConnection) -> None:
        """Make the connection the proof that this process is alive, and write the claim."""
        connection.execute(TAKE, (_key(current().id),))
        self._claim()

    def withdraw(self) -> None:
        """Delete the claim: the session ends, but the process does not."""
        if self._claimed_at > float("-inf"):
            self._ask(WITHDRAW, (current().id,))
            self._claimed_at = float("-inf")

    def _claim(self) -> None:
        self._claimed_at = clock.now()
        self._ask(CLAIM, (current().id,))

    # -- others ------------------------------------------------------------------------

    def is_dead(self, process: ProcessIdentity | None) -> bool:
        """Whether it is known to be dead; sends nothing. From now on the process is watched."""
        if process is None:
            return False
        now = clock.now()
        self._watched[process.id] = now
        return now - self._dead.get(process.id, float("-inf")) < WATCHED_FOR

    def check(self) -> None:
        """Find out which of the watched processes are dead; after an error, none is."""
        try:
            self._check(clock.now())
        except Exception:  # noqa: BLE001 - the next check may succeed
            self._gone.clear()

    def _check(self, now: float) -> None:
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
        answer = self._ask(FIND_DEAD, (watched, [_key(process) for process in watched]))
        found = {process: tuple(facts) for process, *facts in answer}
        for process in watched:
            facts, since = self._gone.get(process, ((), now))
            if process not in found or found[process] != facts:
                self._dead.pop(process, None)
                self._gone[process] = found.get(process, ()), now
            elif now - since >= GRACE:
                if process not in self._dead:
                    # Listings of locks show it, too.
                    self._ask(MARK, (process, facts[-1]))
                self._dead[process] = now


def _key(process: str) -> int:
    digest = hashlib.blake2b(b"django-dlock" + process.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
