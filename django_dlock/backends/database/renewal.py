"""Renews leases, many in one statement, and notes that the process lives."""

from __future__ import annotations

from collections.abc import Sequence

from ... import clock
from ...lease import Outcome, Renewal, RenewalResult
from ..base import RenewalResults
from .connection import Connection
from .rows import Message, Row, micro
from .store import Store
from .table import LeaseTable

__all__ = ["Renewals"]

BEAT_EVERY = 4.0
"""Seconds; a renewal sooner than this after the last heartbeat writes no new heartbeat."""


class Renewals:
    """The renewals and heartbeats of this process in one table."""

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
        results: dict[int, RenewalResult] = {}
        plain = [number for number, each in enumerate(renewals) if not each.shorten]

        def use(one: Connection, store: Store) -> None:
            results.clear()
            dialect, beat = store.dialect, self._beat_of(process)
            keys = [dialect.key(self._table.digest(renewals[number].name)) for number in plain]
            if not plain:
                if beat or not renewals:
                    dialect.beat(one, process)
            else:
                asked = [
                    (key, renewals[number].owner, micro(renewals[number].ttl))
                    for key, number in zip(keys, plain, strict=True)
                ]
                renewed = dialect.renew(one, asked, beat)
                for key, number in zip(keys, plain, strict=True):
                    if dialect.text(key) in renewed:
                        results[number] = RenewalResult("renewed", renewals[number].ttl)
            missed = [number for number in plain if number not in results]
            if missed:
                self._judge(one, store, renewals, missed, results)
            if beat:
                self._beaten = (process, clock.now())

        self._table.call(use, deadline, "renew")
        for number, each in enumerate(renewals):
            if number not in results:
                outcome = self._renew_alone(each, deadline)
                ttl = each.ttl if outcome == "renewed" else 0.0
                results[number] = RenewalResult(outcome, ttl)
        return [results[number] for number in range(len(renewals))]

    def _judge(
        self,
        one: Connection,
        store: Store,
        renewals: Sequence[Renewal],
        missed: Sequence[int],
        results: dict[int, RenewalResult],
    ) -> None:
        """Find out how the leases that were not renewed ended."""
        keys = {n: store.dialect.key(self._table.digest(renewals[n].name)) for n in missed}
        now, rows = store.dialect.read_many(one, list(keys.values()))
        for number, key in keys.items():
            row = rows.get(store.dialect.text(key))
            ended = row.outcome_of(renewals[number].owner, now) if row else "refused"
            if ended is not None:
                results[number] = RenewalResult(ended)

    def _renew_alone(self, renewal: Renewal, deadline: float) -> Outcome:
        def change(row: Row, now: int) -> tuple[Outcome, list[Message]]:
            return row.renew(renewal, now), []

        return self._table.change(renewal.name, change, deadline, "renew")

    def _beat_of(self, process: str) -> str:
        """The process id, if a new heartbeat is due; else an empty string."""
        known, at = self._beaten
        return "" if known == process and clock.now() - at < BEAT_EVERY else process
