"""One grant as this process knows it: the lease, who holds it, and how it ended.

A ``Hold`` is shared by the handle, which asks it, and the watchdog, which prolongs it. It has
no thread lock: the one thing that must happen once, its end, is decided by ``dict.setdefault``,
which is atomic and safe in signal handlers and finalizers.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from . import clock, events, signals
from .backends.base import BaseLockBackend
from .exceptions import LeaseLost, NotHeld
from .lease import Fate, Lease, Renewal
from .lock_options import LockOptions

__all__ = ["Hold", "HolderKey", "LockState", "holder_ended", "registry"]

LockState = Literal["free", "held", "in_doubt", "lost"]

HolderKey: TypeAlias = object
"""Who holds: a ``threading.Thread``, an ``asyncio.Task``, or a mark of the handle's own.

The objects themselves and not their ids, which a later thread or task may be given again.
"""

RENEWALS_PER_TTL = 3
SETTLED_AFTER = 0.2
"""Seconds after which a lease that was granted for less than was asked for is prolonged: one that
a release handed over lives for a moment only, lest a dead waiter be waited for."""
MOMENTS_A_SECOND = 64
"""Ends are told at one of these, so that holds share them."""

_RELEASED = "released"
_LOSS_BY_FATE: Mapping[Fate, str] = {"expired": "expired", "broken": "broken"}


def holder_ended(key: HolderKey) -> bool:
    """Whether the thread or task that holds has ended; a handle's own mark never ends."""
    if isinstance(key, asyncio.Future):
        # A closed loop runs its tasks no more, done or not.
        return key.done() or key.get_loop().is_closed()
    if isinstance(key, threading.Thread):
        if not key.is_alive():
            return True
        # A thread that Python did not start counts as alive for ever, but the system knows.
        if isinstance(key, threading._DummyThread) and os.path.isdir("/proc/self/task"):
            return not os.path.exists(f"/proc/self/task/{key.native_id}")
    return False


@functools.lru_cache(maxsize=128)
def _step(interval: float) -> float:
    """A power of two, so that the steps of different intervals meet: 1/64 to 1/32 of this one."""
    return math.ldexp(1.0, math.frexp(interval)[1] - 6)


class Hold:
    """See the module.

    Attributes:
        acquired_at, confirmed_at, deadline: On ``clock.now()``; ``confirmed_at`` is when the
            last confirmed acquire or renewal was sent.
        ttl: Seconds, as last confirmed.
        renewal_ttl: Seconds that renewals ask for.
        max_end: When renewal must end, by ``max_hold``.
        due: When it is to be renewed; its deadline where it is not.
        planned: When the watchdog will look at it; the watchdog's own.
        renews: Whether the watchdog prolongs it (still).
        failures: Renewals without an answer since the last confirmed one.
    """

    __slots__ = (
        "__weakref__",
        "_capped",
        "_end",
        "_stopped",
        "acquired_at",
        "backend",
        "confirmed_at",
        "deadline",
        "depth",
        "doubt_told",
        "due",
        "failures",
        "handle",
        "key",
        "max_end",
        "metadata",
        "min_hold",
        "name",
        "on_lost",
        "outer_transactions",
        "owner",
        "planned",
        "renewal_ttl",
        "renews",
        "sender",
        "token",
        "ttl",
    )

    def __init__(
        self,
        lease: Lease,
        backend: BaseLockBackend,
        key: HolderKey,
        options: LockOptions,
        *,
        handle: Any,
        sender: type,
    ) -> None:
        self.name, self.owner, self.token = lease.name, lease.owner, lease.token
        self.ttl = lease.ttl
        self.renewal_ttl = min(options.ttl, options.max_hold)
        self.backend = backend
        self.key = key
        self.handle = weakref.ref(handle)
        self.sender = sender
        self.renews = options.renew
        self.min_hold = options.min_hold
        self.metadata = options.metadata
        self.on_lost = options.on_lost
        # 0 says to other handles of the holder that this hold is not shared.
        self.depth = 1 if options.reentrant else 0
        self.failures = 0
        self.doubt_told = False
        self.planned = 0.0
        self.outer_transactions: tuple[object, ...] = ()
        self._end: dict[str, tuple[str]] = {}
        self._stopped = ""
        # The deadline was counted from the moment of sending.
        sent_at = lease.deadline - lease.ttl * (1 - clock.DRIFT)
        self.acquired_at = self.confirmed_at = sent_at
        self.max_end = sent_at + options.max_hold
        self.deadline = min(lease.deadline, self.max_end)
        if self.renews and lease.ttl < self.renewal_ttl:
            self._settle_soon(options.max_hold)
        else:
            self._capped = self._reaches_end(sent_at, lease.ttl)
            self._plan()

    # -- what the holder asks, without I/O ---------------------------------------------

    @property
    def alias(self) -> str:
        return self.backend.alias

    @property
    def state(self) -> LockState:
        end = self._end.get("how")
        if end is not None:
            return "free" if end[0] == _RELEASED else "lost"
        now = clock.now()
        if now >= self.deadline:
            # Said once it must stay said, even if a late renewal is confirmed just now.
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
    def ended(self) -> bool:
        """Released or lost, as far as anybody has noticed."""
        return bool(self._end)

    @property
    def lost_reason(self) -> str | None:
        return self._end["how"][0] if self.state == "lost" else None

    @property
    def remaining(self) -> float:
        left = self.deadline - clock.now()
        if left > 0 and not self._end:
            return left
        # Asked, so that a loss that nobody has noticed is told.
        return max(0.0, left) if self.active else 0.0

    def check(self) -> None:
        """Return while it is active.

        Raises:
            LeaseLost: It ended under its holder.
            NotHeld: It was given back.
        """
        if not self.active:
            raise self.end_error()

    def end_error(self) -> LeaseLost | NotHeld:
        """What there is to raise once it is not active any more."""
        reason = self.lost_reason
        if reason is None:
            return NotHeld("It was released", self.name, self.alias)
        return LeaseLost(f"The lease is lost: {reason}", self.name, self.alias, reason)

    # -- how it lives on ---------------------------------------------------------------

    def renewal(self, now: float) -> Renewal:
        """The next renewal; the last one is cut so that the lease ends with ``max_hold``."""
        ttl = self.renewal_ttl
        if now + ttl > self.max_end:
            ttl = max(self.max_end - now, 0.001)
        return Renewal(self.name, self.owner, ttl)

    def confirm(self, sent_at: float, ttl: float, now: float) -> None:
        """A renewal that was sent at ``sent_at`` is confirmed."""
        if now >= self.deadline:
            # A late "yes" must not bring a hold back that was already told lost.
            self.lose(self._deadline_reason())
            return
        if sent_at < self.confirmed_at:
            # Overtaken by a renewal by hand, for another TTL perhaps.
            return
        self.confirmed_at, self.ttl = sent_at, ttl
        self.deadline = sent_at + ttl * (1 - clock.DRIFT)
        self._capped = self._reaches_end(sent_at, ttl)
        if self._capped:
            self.deadline = min(self.deadline, self.max_end)
        self.failures = 0
        self.doubt_told = False
        self._plan()

    def stop_renewing(self, reason: str) -> None:
        """Let the lease end with its TTL; ``reason`` is told then."""
        self.renews = False
        self._stopped = reason
        self.due = self.deadline

    def tell_doubt(self, now: float) -> None:
        """Send ``in_doubt`` once per stretch without a confirmation."""
        if self._in_doubt(now) and not self.doubt_told:
            self.doubt_told = True
            events.warn(
                "Lock %r (alias %r): no renewal was confirmed for %.1f s, %.1f s left",
                self.name,
                self.alias,
                now - self.confirmed_at,
                self.deadline - now,
            )
            events.send(signals.in_doubt, self.sender, **self.facts())

    def _reaches_end(self, sent_at: float, ttl: float) -> bool:
        """Whether this lease was cut so that it ends with ``max_hold``."""
        return sent_at + ttl >= self.max_end - 1e-6

    def _settle_soon(self, max_hold: float) -> None:
        """Plan the first renewal of a lease that is shorter than what was asked for."""
        # It was handed over while its holder waited, some time after that one's last request:
        # hold, doubt and haste count from now, as if that had asked for what is left.
        self.acquired_at = self.confirmed_at = now = clock.now()
        self.ttl = max(self.deadline - now, 0.0) / (1 - clock.DRIFT)
        self.max_end, self._capped = now + max_hold, False
        self.due = now + min(self.ttl / RENEWALS_PER_TTL, SETTLED_AFTER)

    def next_look(self) -> float:
        """When the watchdog has to look at it: it is due, to be doubted, or at its end."""
        told_at = self.deadline
        if self.renews and not self._capped and not self.doubt_told:
            told_at = min(told_at, self.confirmed_at + self.ttl / 2)
        if self.due < told_at:
            return self.due
        return math.ceil(told_at * MOMENTS_A_SECOND) / MOMENTS_A_SECOND

    def due_soon(self, now: float) -> bool:
        """Whether it is to be renewed and half of the interval has passed."""
        return self.due < self.deadline and self.due - now <= (self.due - self.confirmed_at) / 2

    def _plan(self) -> None:
        if self.renews and not self._capped:
            interval = self.ttl / RENEWALS_PER_TTL
            # A little earlier, so that many holds come due in one moment: renewals fall into step.
            at, step = self.confirmed_at + interval, _step(interval)
            self.due = at - at % step
        else:
            self.due = self.deadline

    def _in_doubt(self, now: float) -> bool:
        # A fixed lease is never in doubt: nobody promised to confirm it again.
        return self.renews and not self._capped and now >= self.confirmed_at + self.ttl / 2

    # -- how it ends -------------------------------------------------------------------

    def end_released(self) -> bool:
        """Note that the holder gives it back; false where it had ended already."""
        return self._finish(_RELEASED)

    def lose(self, reason: str) -> bool:
        """Note the loss and tell everybody, once; false where it had ended already."""
        if not self._finish(reason):
            return False
        held_for = clock.now() - self.acquired_at
        events.warn(
            "Lock %r (alias %r) was lost after %.1f s: %s", self.name, self.alias, held_for, reason
        )
        if self.on_lost is not None:
            events.call(self._call_on_lost, reason)
        events.send(signals.lost, self.sender, reason=reason, held_for=held_for, **self.facts())
        return True

    def lose_silently(self, reason: str) -> bool:
        """Note the loss without a word, for a forked child and at exit."""
        return self._finish(reason)

    def lose_by_fate(self, fate: Fate) -> None:
        self.lose(_LOSS_BY_FATE.get(fate, "refused"))

    def facts(self) -> dict[str, Any]:
        """What every signal says."""
        return {
            "name": self.name,
            "alias": self.alias,
            "owner": self.owner,
            "token": self.token,
            "metadata": self.metadata,
        }

    def _finish(self, how: str) -> bool:
        mine = (how,)
        won = self._end.setdefault("how", mine) is mine
        if won:
            registry.drop(self)
        return won

    def _deadline_reason(self) -> str:
        if self._capped:
            return "max_hold"
        if self._stopped:
            return self._stopped
        return "unreachable" if self.failures else "expired"

    def _call_on_lost(self, reason: str) -> None:
        handle = self.handle()
        if handle is not None and self.on_lost is not None:
            self.on_lost(handle, reason)


class _Registry:
    """Which holds this process has, by backend, name and holder.

    Not by alias, which names another backend once the settings have changed.
    """

    def __init__(self) -> None:
        self._holds: dict[tuple[BaseLockBackend, str, HolderKey], Hold] = {}

    def find(self, backend: BaseLockBackend, name: str, key: HolderKey) -> Hold | None:
        """The hold of this holder, unless it has ended or its handle was collected."""
        hold = self._holds.get((backend, name, key))
        if hold is None or not hold.active or hold.handle() is None:
            return None
        return hold

    def add(self, hold: Hold) -> None:
        self._holds[hold.backend, hold.name, hold.key] = hold

    def drop(self, hold: Hold) -> None:
        place = (hold.backend, hold.name, hold.key)
        if self._holds.get(place) is hold:
            self._holds.pop(place, None)

    def take_all(self) -> list[Hold]:
        """All holds; the registry is empty afterwards."""
        holds, self._holds = self._holds, {}
        return list(holds.values())


registry = _Registry()
