"""Renews leases, many in one statement, and notes that the process lives."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ... import clock
from ...lease import Outcome, Renewal, RenewalResult
from ...log import logger
from ..base import RenewalResults
from .connection import Connection
from .rows import Message, Row, micro
from .store import Store
from .table import LeaseTable

BEAT_EVERY = 4.0
"""Seconds; a renewal sooner than this after the last heartbeat writes no new heartbeat."""
PAUSES = (0.005, 0.01, 0.02, 0.04)
"""Seconds before each further attempt on rows that others have locked."""


class Renewals:
    """The renewals and heartbeats of this process in one table.

    Rows that another transaction has locked must not keep the others from being renewed. They are
    left out and tried again a few times, because another process that writes the row is done soon.
    For a row that stays locked, such as by an operator's open transaction, the answer is
    ``unanswered``: the holder asks again soon, and its lease is in doubt after half its TTL.
    """

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._beaten: tuple[str, float] = ("", 0.0)

    def forget_beat(self) -> None:
        """Write a heartbeat with the next renewal: the process was noted as ended."""
        self._beaten = ("", 0.0)

    def renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> RenewalResults:
        """See ``BaseLockBackend.renew``."""
        alone = {number: each for number, each in enumerate(renewals) if each.shorten}
        asked = {number: each for number, each in enumerate(renewals) if not each.shorten}
        results, locked = self._renew_unlocked(asked, process, deadline, beats=not renewals)
        if len(renewals) == 1:
            # Nobody else waits for the answer, so this one may wait for the row.
            alone.update({number: asked[number] for number in locked})
            locked = set()
        for pause in PAUSES:
            if not locked:
                break
            time.sleep(max(0.0, min(pause, deadline - clock.now())))
            again = {number: asked[number] for number in locked}
            found, locked = self._renew_unlocked(again, process, deadline)
            results.update(found)
        for number in locked:
            logger.warning(
                "Lock %r cannot be renewed yet: another transaction has locked its row",
                asked[number].name,
                about=asked[number],
                alias=self._table.alias,
            )
            results[number] = RenewalResult("unanswered")
        for number, each in alone.items():
            outcome = self._renew_alone(each, deadline)
            results[number] = RenewalResult(outcome, each.ttl if outcome == "renewed" else 0.0)
        return [results[number] for number in range(len(renewals))]

    def _renew_unlocked(
        self,
        asked: Mapping[int, Renewal],
        process: str,
        deadline: float,
        *,
        beats: bool = False,
    ) -> tuple[dict[int, RenewalResult], set[int]]:
        """Renew the leases whose rows nobody has locked, and write a heartbeat if one is due.

        Args:
            beats: Write a heartbeat in any case.

        Returns:
            Results; and the leases whose rows are locked.
        """

        def use(one: Connection, store: Store) -> tuple[dict[int, RenewalResult], set[int]]:
            dialect, beat = store.dialect, self._beat_of(process)
            keys = {n: dialect.key(self._table.digest(each.name)) for n, each in asked.items()}
            renewed: set[tuple[str, str]] = set()
            if asked:
                values = [(keys[n], each.owner, micro(each.ttl)) for n, each in asked.items()]
                renewed = dialect.renew(one, values, beat)
            elif beat or beats:
                dialect.beat(one, process)
            if beat:
                self._beaten = (process, clock.now())
            results: dict[int, RenewalResult] = {}
            locked: set[int] = set()
            missed = {
                number
                for number, each in asked.items()
                if (dialect.text(keys[number]), each.owner) not in renewed
            }
            now, rows = dialect.read_many(one, [keys[n] for n in missed]) if missed else (0, {})
            for number, each in asked.items():
                if number not in missed:
                    results[number] = RenewalResult("renewed", each.ttl)
                    continue
                row = rows.get(dialect.text(keys[number]), Row(0))
                ended = row.outcome_of(each.owner, now)
                if ended is None:
                    locked.add(number)
                else:
                    results[number] = RenewalResult(ended)
            return results, locked

        return self._table.call(use, deadline, "renew")

    def _renew_alone(self, renewal: Renewal, deadline: float) -> Outcome:
        def change(row: Row, now: int) -> tuple[Outcome, list[Message]]:
            return row.renew(renewal, now)

        return self._table.change(renewal.name, change, deadline, "renew")

    def _beat_of(self, process: str) -> str:
        """The process id, if a new heartbeat is due; else an empty string."""
        known, at = self._beaten
        return "" if known == process and clock.now() - at < BEAT_EVERY else process
