"""What the answers of the nodes mean together, without I/O.

An answer is what a node said, an exception if it said nothing, or ``PENDING``. Each question has a
pair here: whether further answers would change nothing, and what the answers mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...lease import Contention, Lease, LeaseInfo, Outcome, RenewalResult, Waiter
from .broadcast import PENDING

_LOSSES: tuple[Outcome, ...] = ("broken", "released", "expired", "refused", "unknown")
"""How a lease ended; the most informative answer comes first."""

SHORTEST_REMAINING = 0.01
"""Seconds; a waiter must not ask without a pause."""


def _answered(answers: Sequence[Any]) -> list[Any]:
    return [one for one in answers if one is not PENDING and not isinstance(one, BaseException)]


class Votes(NamedTuple):
    """The votes of a number of nodes.

    Attributes:
        nodes: How many there are.
        clock_drift: The fraction by which their clocks may drift apart.
    """

    nodes: int
    clock_drift: float

    @property
    def quorum(self) -> int:
        """How many nodes are a majority: any two have a node in common."""
        return self.nodes // 2 + 1

    def has_quorum(self, answers: Sequence[Any]) -> bool:
        """Whether a quorum has answered at all."""
        return len(_answered(answers)) >= self.quorum

    def certain(self, seconds: float) -> float:
        """The time for which a lease of this duration certainly runs on every node's clock."""
        # Nodes round to milliseconds.
        return max(0.0, seconds * (1 - self.clock_drift) - 0.002)

    # -- acquire -----------------------------------------------------------------------

    def grants(self, answers: Sequence[Any]) -> list[Lease]:
        return [one for one in answers if isinstance(one, Lease)]

    def acquire_decided(self, answers: Sequence[Any]) -> bool:
        refusals = sum(isinstance(one, Contention) for one in answers)
        return len(self.grants(answers)) >= self.quorum or self.nodes - refusals < self.quorum

    def raised(self, answers: Sequence[Any]) -> bool:
        """Whether a quorum has confirmed the token."""
        return _answered(answers).count(1) >= self.quorum

    def contention(self, answers: Sequence[Any]) -> Contention | None:
        """Who is in the way; ``None`` if that is nobody, or too few nodes have answered.

        If a quorum has answered, and some refuse, then others hold or want the name: that is no
        outage, even if a node is down.
        """
        refusals = [one for one in answers if isinstance(one, Contention)]
        if not refusals or not self.has_quorum(answers):
            return None
        count = Counter(one.owner for one in refusals)
        # If the counts are equal, prefer one with an owner: the others only remember this request.
        met = max(refusals, key=lambda one: (count[one.owner], one.owner != ""))
        # This many leases must end before the name can be free at a quorum.
        too_many = max(1, len(refusals) - (self.nodes - self.quorum))
        remaining = sorted(one.remaining for one in refusals)[too_many - 1]
        remaining = max(SHORTEST_REMAINING, self.certain(remaining))
        return met._replace(remaining=remaining)

    # -- renew and release -------------------------------------------------------------

    def outcome(self, answers: Sequence[Any], wanted: Outcome) -> Outcome | None:
        """The quorum's answer about one lease; ``None`` if it is open.

        Args:
            wanted: ``renewed`` or ``released``.
        """
        said = _answered(answers)
        good = said.count(wanted)
        if good >= self.quorum:
            return wanted
        if good + self.nodes - len(said) >= self.quorum:
            return None
        return next(one for one in _LOSSES if one in said and one != wanted)

    def _is_open(self, answers: Sequence[Any], wanted: Outcome) -> bool:
        """Whether answers that may still come can change the outcome."""
        said = _answered(answers)
        good, to_come = said.count(wanted), sum(one is PENDING for one in answers)
        return (
            good < self.quorum <= good + to_come or len(said) < self.quorum <= len(said) + to_come
        )

    def release_decided(self, answers: Sequence[Any]) -> bool:
        return not self._is_open(answers, "released")

    def renewals_decided(self, answers: Sequence[Any]) -> bool:
        said = _answered(answers)
        if len(said) < self.quorum:
            return False
        if len(said) == self.nodes:
            return True
        return all(not self._is_open(one, "renewed") for one in self._by_lease(answers))

    def renewals(self, answers: Sequence[Any]) -> list[RenewalResult]:
        """One result per lease; ``unanswered`` if those who could tell have not answered."""
        results: list[RenewalResult] = []
        for of_lease, granted in zip(self._by_lease(answers), self._granted(answers), strict=True):
            outcome = self.outcome(of_lease, "renewed")
            if outcome == "renewed":
                results.append(RenewalResult("renewed", self.certain(granted)))
            else:
                results.append(RenewalResult(outcome or "unanswered"))
        return results

    def _by_lease(self, answers: Sequence[Any]) -> list[list[Any]]:
        """The answers about each lease, in the order of the nodes."""
        length = len(_answered(answers)[0])
        return [
            [one[lease].outcome if isinstance(one, list) else one for one in answers]
            for lease in range(length)
        ]

    def _granted(self, answers: Sequence[Any]) -> list[float]:
        return [
            max(one.ttl for one in of_lease) for of_lease in zip(*_answered(answers), strict=True)
        ]

    # -- questions ---------------------------------------------------------------------

    def locked_decided(self, answers: Sequence[Any]) -> bool:
        said = _answered(answers)
        return max(said.count(True), said.count(False)) >= self.quorum

    def locked(self, answers: Sequence[Any]) -> bool:
        """Whether the name is taken; true in doubt, because nobody may rely on a free name."""
        return _answered(answers).count(False) < self.quorum

    def lease(self, answers: Sequence[LeaseInfo | Any]) -> LeaseInfo | None:
        """The lease that a quorum may have; each node answers with one or with ``None``."""
        infos = [one for one in _answered(answers) if one is not None]
        if not infos:
            return None
        count = Counter(info.owner for info in infos)
        owner, votes = count.most_common(1)[0]
        if votes + self.nodes - len(_answered(answers)) < self.quorum:
            return None
        return self._merged([info for info in infos if info.owner == owner])

    def waiters(self, answers: Sequence[Any]) -> list[Waiter]:
        """Those who wait at any node, in the order in which they came to their first one."""
        first: dict[str, Waiter] = {}
        for waiter in (one for answer in _answered(answers) for one in answer):
            known = first.get(waiter.owner, waiter)
            first[waiter.owner] = min(known, waiter, key=lambda one: one.since)
        return sorted(first.values(), key=lambda one: one.since)

    def lease_decided(self, answers: Sequence[Any]) -> bool:
        said = _answered(answers)
        count = Counter(None if one is None else one.owner for one in said)
        return bool(count) and max(count.values()) >= self.quorum

    def _merged(self, infos: Sequence[LeaseInfo]) -> LeaseInfo:
        """What the nodes know of one lease, which ends when a quorum no longer has it."""
        from dataclasses import replace

        endless = float("inf")
        # The longest first: with the last one of a quorum, the quorum ends.
        by_end = sorted(infos, key=lambda one: -(endless if one.ttl is None else one.ttl))
        last = by_end[min(self.quorum, len(by_end)) - 1]
        heard = [one.silent_for for one in infos if one.silent_for is not None]
        states = {info.holder_state: info for info in infos}
        best = next(
            states[state] for state in ("dead", "alive", "silent", "unknown") if state in states
        )
        token = Counter(info.token for info in infos).most_common(1)[0][0]
        return replace(
            best,
            token=token,
            ttl=last.ttl,
            granted_ttl=last.granted_ttl,
            silent_for=min(heard, default=None),
            renewals=max(info.renewals for info in infos),
            waiting=max(info.waiting for info in infos),
            damaged=tuple(dict.fromkeys(part for info in infos for part in info.damaged)),
        )
