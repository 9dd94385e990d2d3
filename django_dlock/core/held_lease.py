"""One lease that this process holds: its deadline, its holder, and how it ended.

A ``HeldLease`` is shared by the handle, which reads it, and the watchdog, which renews it. It has
no thread lock: the one thing that must happen once, its end, is decided by ``dict.setdefault``,
which is atomic and safe in signal handlers and finalizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Protocol

from .. import clock, signals
from ..backends.base import BaseLockBackend
from ..exceptions import LeaseLost, NotHeld
from ..lease import Lease, Outcome, Renewal
from ..log import logger
from . import dispatch
from .options import LockOptions
from .registry import HolderKey, HolderRegistry
from .tracing import LockTrace
from .transactions import AfterTransactions

LockState = Literal["free", "held", "in_doubt", "lost"]

RENEWALS_PER_TTL = 3

_RELEASED = "released"


class HoldOfLease(Protocol):
    """What a lease asks of its holds; see ``holds``."""

    by: object
    handle: weakref.ref[Any]
    max_end: float
    options: LockOptions

    def call_on_lost(self, handle: Any, reason: str) -> None: ...


class HeldLease:
    """See the module.

    Attributes:
        token: ``None`` while the name is locked in this process only; see ``fallback``.
        acquired_at, confirmed_at, deadline: On ``clock.now()``; ``acquired_at`` is when the
            grant was received, ``confirmed_at`` when the last confirmed acquire or renewal was
            sent.
        ttl: Seconds, as last confirmed.
        renewal_ttl: Seconds that renewals ask for.
        min_hold: Seconds after ``acquired_at`` for which the name stays taken; the longest of all
            handles that have entered it.
        max_end: When renewal must end: with the first ``max_hold`` of its holds.
        due: When it is to be renewed; its deadline if it is not renewed.
        planned: When the watchdog will check it next; used by the watchdog only.
        renews: Whether the watchdog (still) prolongs it.
        known_as: Another key under which the registry finds it.
        holds: By the owner in the request: one for each time that it was acquired and not
            released since, and the one that was released last.
        failures: Renewals without an answer since the last confirmed one.
        shortenings: Renewals for which the holder named a TTL.
        late: Releases that wait for the end of a transaction.
        trace: Its spans; ``None`` without tracing.
    """

    def __init__(
        self,
        lease: Lease,
        backend: BaseLockBackend,
        key: HolderKey,
        options: LockOptions,
        *,
        sender: type,
    ) -> None:
        self.name, self.owner = lease.name, lease.owner
        self.token: int | None = lease.token
        self.renewal_ttl = min(options.ttl, options.max_hold)
        self.backend = backend
        self.key = key
        self.sender = sender
        self.options = options
        self.renews, self.min_hold = options.renew, options.min_hold
        self.known_as: HolderKey = None
        self.trace: LockTrace | None = None
        self.holds: dict[str, HoldOfLease] = {}
        self.failures = self.shortenings = 0
        self.doubt_told = self._doubted = False
        self.planned = 0.0
        self.late: tuple[weakref.ref[AfterTransactions], ...] = ()
        self.outer_transactions: tuple[object, ...] = ()
        self._end: dict[str, tuple[str]] = {}
        self._stopped = ""
        self.acquired_at = clock.now()
        self.max_end = self.acquired_at + options.max_hold
        self._set_deadline(lease.asked_at, lease.ttl)

    # -- state, without I/O ------------------------------------------------------------

    @property
    def alias(self) -> str:
        return self.backend.alias

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.options.metadata

    @property
    def state(self) -> LockState:
        end = self._end.get("how")
        if end is not None:
            return "free" if end[0] == _RELEASED else "lost"
        now = clock.now()
        if now >= self.deadline:
            # Once reported as lost, it stays lost, even if a late renewal is confirmed just now.
            self.lose(self._deadline_reason())
            return "lost"
        return "in_doubt" if self._in_doubt(now) else "held"

    @property
    def active(self) -> bool:
        """Held or in doubt."""
        return (not self._end and clock.now() < self.deadline) or self.state in (
            "held",
            "in_doubt",
        )

    @property
    def collected(self) -> bool:
        """Whether every ``Lock`` that holds it is garbage, so that nobody can release it."""
        return all(hold.handle() is None for hold in self.holds.copy().values())

    def is_of(self, *callers: object) -> bool:
        """Whether one of these tasks and threads has acquired it."""
        return any(hold.by in callers for hold in self.holds.copy().values())

    @property
    def ended(self) -> bool:
        """Whether its end, by release or loss, has been noticed."""
        return bool(self._end)

    @property
    def lost_reason(self) -> str | None:
        return self._end["how"][0] if self.state == "lost" else None

    @property
    def remaining(self) -> float:
        left = self.deadline - clock.now()
        if left > 0 and not self._end:
            return left
        # ``active`` notices, and reports, a loss that was not noticed so far.
        return max(0.0, left) if self.active else 0.0

    def check(self) -> None:
        """Return while it is active.

        Raises:
            LeaseLost: It ended while held.
            NotHeld: It was released.
        """
        if not self.active:
            raise self.end_error()

    def end_error(self) -> LeaseLost | NotHeld:
        """The error to raise once it is no longer active."""
        reason = self.lost_reason
        if reason is None:
            return NotHeld("It was released", self.name, self.alias)
        return LeaseLost(f"The lease is lost: {reason}", self.name, self.alias, reason)

    # -- renewal -----------------------------------------------------------------------

    def renewal(self, now: float) -> Renewal:
        """The next renewal; the last one is cut so that the lease ends with ``max_hold``."""
        ttl = self.renewal_ttl
        if now + ttl > self.max_end:
            ttl = max(self.max_end - now, 0.001)
        return Renewal(self.name, self.owner, ttl)

    def renewal_by_holder(self, ttl: float, now: float) -> Renewal:
        """Like ``renewal``, with another TTL, which may also be shorter than the time left."""
        self.renewal_ttl = ttl
        self.shortenings += 1
        renewal = self.renewal(now)._replace(shorten=self.shortenings)
        if now + renewal.ttl < self.deadline:
            # The backend may shorten the lease even if its answer is lost, so believe it now. A
            # longer renewal that is confirmed meanwhile was sent earlier.
            self._set_deadline(now, renewal.ttl)
        return renewal

    def note_entry(self, options: LockOptions) -> bool:
        """Give another of its holds what that was asked for; returns whether renewal begins."""
        if options.min_hold:
            entered = clock.now() - self.acquired_at
            self.min_hold = max(self.min_hold, entered + options.min_hold)
        if self.renews or self._stopped or not options.renew:
            return False
        self.renews = True
        self.renewal_ttl = max(self.renewal_ttl, min(options.ttl, options.max_hold))
        self._set_deadline(self.confirmed_at, self.ttl)
        return True

    def note_exit(self, now: float) -> None:
        """Let it go on as its other holds were asked for, after one of them was released."""
        if self.renews and not any(hold.options.renew for hold in self.holds.copy().values()):
            self.renews = False
            self._set_due()
        if (end := self.first_end()) > self.max_end:
            self.end_at(end, now)
            # The store may have cut it.
            self.due = now

    def first_end(self) -> float:
        """When the first ``max_hold`` of its present holds ends it."""
        return min((hold.max_end for hold in self.holds.copy().values()), default=self.max_end)

    def end_at(self, end: float, now: float) -> Renewal | None:
        """Let ``max_hold`` end it then.

        Returns:
            The renewal that cuts it in the store, too, if it was granted for longer.
        """
        self.max_end = end
        if self.confirmed_at + self.ttl <= end:
            self._set_deadline(self.confirmed_at, self.ttl)
            return None
        self.shortenings += 1
        renewal = self.renewal(now)._replace(shorten=self.shortenings)
        # As in ``renewal_by_holder``. It may end later again, when another hold is released.
        self._set_deadline(now, renewal.ttl)
        return renewal

    def confirm(self, sent_at: float, ttl: float, now: float) -> None:
        """A renewal that was sent at ``sent_at`` is confirmed."""
        if now >= self.deadline:
            # A late confirmation must not revive a lease that was reported as lost.
            self.lose(self._deadline_reason())
            return
        if sent_at < self.confirmed_at:
            # A later renewal, perhaps with another TTL, was confirmed first.
            return
        self.failures = 0
        self.doubt_told = self._doubted = False
        self._set_deadline(sent_at, ttl)

    def renewed(self, sent_at: float, ttl: float, now: float) -> None:
        """Confirm a renewal, by the watchdog or by the holder, and report it."""
        self.confirm(sent_at, ttl, now)
        if self.ended:
            return
        if self.trace is not None:
            self.trace.renewed(sent_at)
        if signals.renewed.receivers:
            dispatch.send(signals.renewed, self.sender, **self.signal_kwargs())

    def refused(self, sent_at: float, outcome: Outcome) -> None:
        """Lose it by the backend's answer to a renewal."""
        if self.trace is not None:
            self.trace.renewed(sent_at, outcome)
        self.lose_by_outcome(outcome)

    def unanswered(self, sent_at: float, error: Exception) -> None:
        """Note that a renewal was not answered."""
        self.failures += 1
        if self.trace is not None:
            self.trace.renewed(sent_at, type(error).__name__)

    def stop_renewing(self, reason: str) -> None:
        """Let the lease end with its TTL, and report ``reason`` then."""
        self.renews = False
        self._stopped = reason
        self.due = self.deadline

    def release_overdue(self) -> None:
        """Carry out a release whose transaction has ended without a word, on another thread."""
        for reference in self.late:
            late = reference()
            if late is not None and late.is_overdue():
                dispatch.late_releases.post(late.run)

    def doubt(self, now: float) -> bool:
        """Put it in doubt until the next confirmation; ``False`` for one that is not renewed."""
        if self.ended or not self.renews or self._capped:
            return False
        self._doubted = True
        self.report_doubt(now)
        return True

    def report_doubt(self, now: float) -> None:
        """Send ``in_doubt``, once until the next confirmation."""
        if self._in_doubt(now) and not self.doubt_told:
            self.doubt_told = True
            dispatch.log_warning(
                "Lock %r (alias %r): no renewal was confirmed for %.1f s, %.1f s left",
                self.name,
                self.alias,
                now - self.confirmed_at,
                self.deadline - now,
                about=self,
            )
            dispatch.send(signals.in_doubt, self.sender, **self.signal_kwargs())

    def _set_deadline(self, sent_at: float, ttl: float) -> None:
        """Note what was granted, and plan the next renewal."""
        self.confirmed_at, self.ttl = sent_at, ttl
        left = self.max_end - sent_at
        # True if nothing is left to ask for: the lease ends with ``max_hold``. If a backend grants
        # less than asked, the rest is asked for again, but not when only little is missing.
        self._capped = left <= self.renewal_ttl * (1 + clock.DRIFT) and (
            ttl >= 0.9 * left or left < 3 * self.backend.command_timeout
        )
        self.deadline = min(sent_at + ttl * (1 - clock.DRIFT), self.max_end)
        self._set_due()

    def next_time(self) -> float:
        """When the watchdog must act next: a renewal is due, or a doubt, or the end."""
        look_at = min(self.due, self.deadline)
        if self.renews and not self._capped and not self.doubt_told:
            look_at = min(look_at, self.confirmed_at + self.ttl / 2)
        return look_at

    def due_soon(self, now: float) -> bool:
        """Whether its renewal is due within half an interval."""
        return self.due < self.deadline and self.due - now <= (self.due - self.confirmed_at) / 2

    def _set_due(self) -> None:
        if self.renews and not self._capped:
            self.due = self.confirmed_at + self.ttl / RENEWALS_PER_TTL
        else:
            self.due = self.deadline

    def _in_doubt(self, now: float) -> bool:
        # A fixed lease is never in doubt, because nobody renews it.
        if not self.renews or self._capped:
            return False
        return self._doubted or now >= self.confirmed_at + self.ttl / 2

    # -- how it ends -------------------------------------------------------------------

    def end_released(self, **reason: str) -> bool:
        """Mark it as released and report that; returns ``False`` if it had ended already."""
        if not self._finish(_RELEASED):
            return False
        if dispatch.has_receivers(signals.released, self.sender):
            held_for = clock.now() - self.acquired_at
            facts = {"held_for": held_for, **reason, **self.signal_kwargs()}
            dispatch.send(signals.released, self.sender, **facts)
        return True

    def end_silently(self) -> bool:
        """Mark it as released without reporting that."""
        return self._finish(_RELEASED)

    def end_by_release(self, outcome: Outcome) -> None:
        """Record the backend's answer to a release."""
        if outcome == "unknown" and self.active:
            logger.info(
                "Lock %r (alias %r): already released, or gone; the backend cannot tell which",
                self.name,
                self.alias,
                about=self,
            )
            self.end_released()
        elif outcome != "released":
            self.lose_by_outcome(outcome)
        else:
            self.end_released()

    def lose(self, reason: str) -> bool:
        """Mark it as lost and report that, once; returns ``False`` if it had ended already."""
        if not self._finish(reason):
            return False
        held_for = clock.now() - self.acquired_at
        dispatch.log_warning(
            "Lock %r (alias %r) was lost after %.1f s: %s",
            self.name,
            self.alias,
            held_for,
            reason,
            about=self,
            reason=reason,
        )
        # Once for each handle, even if it has entered the lease several times.
        for hold in {id(hold.handle): hold for hold in self.holds.copy().values()}.values():
            # Kept until then: its last reference may be gone before its turn has come.
            on_lost, handle = hold.options.on_lost, hold.handle()
            if on_lost is not None and handle is not None:
                dispatch.call_on_lost(on_lost, partial(hold.call_on_lost, handle, reason))
        dispatch.send(
            signals.lost, self.sender, reason=reason, held_for=held_for, **self.signal_kwargs()
        )
        return True

    def lose_silently(self, reason: str) -> bool:
        """Mark it as lost without reporting it: in a forked child."""
        return self._finish(reason)

    def lose_by_outcome(self, outcome: Outcome) -> None:
        self.lose(outcome if outcome in ("expired", "broken") else "refused")

    def signal_kwargs(self) -> dict[str, Any]:
        """The arguments that every signal has."""
        return {
            "name": self.name,
            "alias": self.alias,
            "owner": self.owner,
            "token": self.token,
            "metadata": self.options.metadata,
            "template": self.options.template,
        }

    def _finish(self, how: str) -> bool:
        mine = (how,)
        won = self._end.setdefault("how", mine) is mine
        if won:
            registry.discard(self)
            # The span of a lease that was held at a fork is the parent's.
            if self.trace is not None and how != "fork":
                self.trace.ended(how)
        return won

    def _deadline_reason(self) -> str:
        if self._capped:
            return "max_hold"
        if self._stopped:
            return self._stopped
        return "unreachable" if self.failures else "expired"


registry: HolderRegistry[HeldLease] = HolderRegistry()
