"""Examines the store of one alias: asks it, takes one lock there, and reads its facts."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .. import clock, process
from ..backends.base import BaseLockBackend
from ..core.cleanup import cancel_later, cancel_unanswered
from ..exceptions import BackendRefused, BackendUnavailable
from ..lease import Contention, Lease, LeaseRequest, Renewal

NAME = "django_dlock.diagnosis"
"""The lock that is looked up and acquired."""
ROUND_TRIPS = 5
SLOW = 1 / 3
"""The fraction of ``command_timeout`` above which answers count as slow."""
CLOCK_TOLERANCE = 2.0
"""Seconds; some stores tell their time in whole seconds."""
PAUSE = 0.02
"""Seconds between two attempts while another process takes the same lock."""

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        alias: Empty for what concerns the whole project.
        topic: What it is about, in one word, or the id of a system check.
        hint: What to do; empty if there is nothing.
        values: Numbers that belong to the message, for programs.
    """

    alias: str
    severity: Severity
    topic: str
    message: str
    hint: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def of_alias(backend: BaseLockBackend, *, read_only: bool) -> Iterator[Finding]:
    """Ask the store; the first finding tells whether it answers.

    Args:
        read_only: Take no lock.
    """
    alias = backend.alias
    try:
        yield _answer(backend)
    except BackendUnavailable as error:
        yield Finding(alias, "error", "answer", str(error), _cure(error, alias))
        return
    if not read_only:
        yield from _Cycle(backend).run()
    try:
        facts = backend.facts(deadline=backend.call_deadline())
    except BackendUnavailable as error:
        yield Finding(alias, "error", "server", str(error), _cure(error, alias))
        return
    for topic, text, hint in facts:
        yield Finding(alias, "warning" if hint else "ok", topic, text, hint)


def _answer(backend: BaseLockBackend) -> Finding:
    """How long harmless reads take.

    Raises:
        BackendUnavailable: No answer.
    """
    deadline = backend.call_deadline()
    seconds: list[float] = []
    # All of them within one ``command_timeout``.
    while len(seconds) <= ROUND_TRIPS and (not seconds or clock.now() < deadline):
        started = time.perf_counter()
        backend.locked(NAME, deadline=deadline)
        seconds.append(time.perf_counter() - started)
    # The first one may connect.
    connected, *others = seconds
    median = statistics.median(others or [connected])
    values = {"first_ms": _ms(connected), "median_ms": _ms(median), "round_trips": len(seconds)}
    message = f"{_ms(median):g} ms, the median of {len(others) or 1}"
    if others:
        message += f"; the first took {_ms(connected):g} ms"
    if median > SLOW * backend.command_timeout:
        message += f"; command_timeout is {backend.command_timeout:g} s"
        hint = "Raise OPTIONS['command_timeout'], or find out why the server or network is slow."
        return Finding(backend.alias, "warning", "answer", message, hint, values)
    return Finding(backend.alias, "ok", "answer", message, "", values)


class _Cycle:
    """Acquires a lock, tries it for another owner, renews it and releases it."""

    def __init__(self, backend: BaseLockBackend) -> None:
        self._backend, self._alias = backend, backend.alias
        # If this process is killed now, the name is soon free again.
        ttl = min(3 * backend.command_timeout, backend.max_ttl)
        self._request = LeaseRequest(NAME, secrets.token_hex(16), ttl)

    def run(self) -> Iterator[Finding]:
        started = time.perf_counter()
        try:
            lease = self._acquire()
        except BackendUnavailable as error:
            cancel_unanswered(self._backend, self._request, error)
            yield self._error(f"no lock can be acquired: {error}", _cure(error, self._alias))
            return
        if lease is None:
            message = "not tried: another process is trying it at the same time"
            yield Finding(self._alias, "warning", "cycle", message, "Run it again.")
            return
        spent = time.perf_counter() - started
        try:
            findings = [*self._contend(), *self._renew(lease)]
            asked_at = time.perf_counter()
            findings += self._release()
            spent += time.perf_counter() - asked_at
        except BackendUnavailable as error:
            cancel_later(self._backend, self._request)
            yield self._error(f"a lock was acquired, and then: {error}", _cure(error, self._alias))
            return
        if not any(finding.severity == "error" for finding in findings):
            message = f"acquired and released in {_ms(spent):g} ms, and renewed"
            values = {"cycle_ms": _ms(spent)}
            yield Finding(self._alias, "ok", "cycle", message, "", values)
        yield from findings

    def _acquire(self) -> Lease | None:
        """``None`` while another process has it."""
        deadline = self._backend.call_deadline()
        while True:
            answer = self._backend.acquire(self._request, deadline=deadline)
            if isinstance(answer, Lease):
                return answer
            if clock.now() + PAUSE >= deadline:
                return None
            time.sleep(PAUSE)

    def _contend(self) -> Iterator[Finding]:
        rival = self._request._replace(owner=secrets.token_hex(16))
        asked_at = time.time()
        met = self._backend.acquire(rival, deadline=self._backend.call_deadline())
        answered_at = time.time()
        if isinstance(met, Contention):
            yield from self._clock(met.now, asked_at, answered_at)
            return
        cancel_later(self._backend, rival)
        hint = "Take no locks there until its store is repaired or replaced."
        yield self._error("the same name was granted to two owners", hint)

    def _clock(self, now: float, asked_at: float, answered_at: float) -> Iterator[Finding]:
        if not now:
            return
        ahead = now - (asked_at + answered_at) / 2
        way = "ahead of" if ahead >= 0 else "behind"
        message = f"the server's clock is {abs(ahead):.3f} s {way} that of this machine"
        values = {"ahead_seconds": round(ahead, 6)}
        if abs(ahead) - (answered_at - asked_at) / 2 <= CLOCK_TOLERANCE:
            yield Finding(self._alias, "ok", "clock", message, "", values)
            return
        hint = (
            "Run NTP on both. Leases use the server's clock only, but the times of logs, records "
            "and delayed tasks do not fit together."
        )
        yield Finding(self._alias, "warning", "clock", message, hint, values)

    def _renew(self, lease: Lease) -> Iterator[Finding]:
        (result,) = self._backend.renew(
            [Renewal(NAME, lease.owner, self._request.ttl)],
            process=process.current().id,
            deadline=self._backend.call_deadline(),
        )
        if result.outcome != "renewed":
            hint = "See the server's log: it has lost a lease that it granted a moment ago."
            yield self._error(f"a lease was not renewed: {result.outcome}", hint)

    def _release(self) -> Iterator[Finding]:
        outcome = self._backend.release(
            NAME, self._request.owner, min_hold=0.0, deadline=self._backend.call_deadline()
        )
        if outcome != "released":
            hint = "See the server's log: it has lost a lease that it granted a moment ago."
            yield self._error(f"a lease was not released: {outcome}", hint)

    def _error(self, message: str, hint: str) -> Finding:
        return Finding(self._alias, "error", "cycle", message, hint)


def _cure(error: BackendUnavailable, alias: str) -> str:
    if error.cure:
        return error.cure
    if isinstance(error, BackendRefused):
        return f"Correct the user, password or rights: of DLOCKS[{alias!r}], or at the server."
    return f"Start the server, or correct DLOCKS[{alias!r}]."


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
