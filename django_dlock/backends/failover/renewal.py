"""Renews leases in the store of the present epoch; those of another epoch get no answer."""

from __future__ import annotations

from collections.abc import Sequence

from ... import clock
from ...lease import Renewal, RenewalResult
from ..base import PendingRenewal, RenewalResults
from .terms import Leases

UNANSWERED = RenewalResult("unanswered")


class TermRenewal:
    """A ``PendingRenewal``; leases of an older epoch are ``unanswered``.

    So they are in doubt from then on, and lost at their deadline.
    """

    def __init__(
        self, leases: Leases, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> None:
        self._leases, self._count = leases, len(renewals)
        # By their index in the call.
        self._asked: dict[int, Renewal] = {}
        self._call: PendingRenewal | None = None
        term, now = leases.latest, clock.now()
        if term is None:
            # Before the first acquire.
            return
        left = term.latest_end - now
        for index, renewal in enumerate(renewals):
            if left > 0 and leases.of(renewal.owner) is term:
                self._asked[index] = renewal._replace(ttl=min(renewal.ttl, left))
        self._term = term
        if self._asked or not renewals:
            asked = list(self._asked.values())
            self._call = term.store.start_renew(asked, process=process, deadline=deadline)

    def wait(self, timeout: float) -> bool:
        return self._call is None or self._call.wait(timeout)

    def result(self) -> RenewalResults:
        results = [UNANSWERED] * self._count
        if self._call is None:
            return results
        answers = self._call.result()
        now = clock.now()
        for (index, renewal), answer in zip(self._asked.items(), answers, strict=True):
            results[index] = answer
            if answer.outcome == "renewed":
                self._leases.add(renewal.owner, self._term, now + answer.ttl)
        return results

    def abandon(self) -> None:
        if self._call is not None:
            self._call.abandon()
