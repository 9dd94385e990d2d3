"""What this process has asked ZooKeeper for, and what has become of it.

A node lives for as long as its process's session, and only that process asks about it. So the
process itself remembers how its leases ended, and ends a lease whose TTL is over: it deletes the
node, later than the holder's own deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import clock
from ...lease import Lease, LeaseRequest, Outcome, Renewal, RenewalResult
from .nodes import LockNode
from .session import Session

MEMORY = 60.0
"""Seconds in addition to the TTL for which ends and cancelled requests are remembered."""
IDLE = 60.0
"""Seconds without a lease after which the thread ends."""
AGAIN = 0.5
"""Seconds until a node that could not be deleted is deleted again."""


@dataclass(eq=False)
class Attempt:
    """One request of this process.

    Attributes:
        session: The id of the session that created its node; 0 while no node is known.
        token: The node's ``czxid``.
        data: What is in its node.
        ahead: The nodes that were created before it and are not known to be gone, in order;
            ``None`` while that is not known. No later node comes before it.
        until: When its lease ends, on ``clock.now()``; 0 while it is not granted.
        shortened: The number of the last renewal in which the holder named a shorter TTL.
        releasing: A release was sent.
        asked: The request that creates its node was sent.
    """

    name: str
    owner: str
    path: str
    ttl: float
    session: int = 0
    token: int = 0
    data: bytes = b""
    ahead: list[LockNode] | None = None
    until: float = 0.0
    shortened: int = 0
    releasing: bool = False
    asked: bool = False

    def node_gone(self) -> None:
        """Its node is gone."""
        self.session, self.ahead = 0, None


@dataclass
class _End:
    outcome: Outcome
    forget_at: float


@dataclass
class Attempts:
    """See the module. No method waits for the server.

    Args:
        delete: Deletes the node of an attempt; says whether it is certainly gone.
    """

    delete: Callable[[Attempt], bool]
    _live: dict[str, Attempt] = field(default_factory=dict)
    _ends: dict[str, _End] = field(default_factory=dict)
    _expired: list[Attempt] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _wakes_at: float = 0.0

    def __post_init__(self) -> None:
        # Reentrant: a signal handler may release while its thread is in here.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    # -- acquire -----------------------------------------------------------------------

    def begin(self, request: LeaseRequest, path: str) -> Attempt | None:
        """The attempt of this owner; ``None`` if it has ended, and may be granted nothing."""
        with self._lock:
            attempt = self._live.get(request.owner)
            if attempt is not None and attempt.until and clock.now() >= attempt.until:
                self._expire(attempt)
            if self._ends.get(request.owner):
                return None
            if request.owner not in self._live:
                self._live[request.owner] = Attempt(request.name, request.owner, path, request.ttl)
            return self._live[request.owner]

    def create(self, attempt: Attempt, send: Callable[[], Any]) -> Any:
        """Send the request that creates the node; ``None`` if the attempt has been cancelled.

        Under the lock, so that the deletion by which an attempt is cancelled comes after it.
        """
        with self._lock:
            if self._live.get(attempt.owner) is not attempt:
                return None
            attempt.asked = True
            return send()

    def drop(self, attempt: Attempt) -> None:
        """Forget an attempt that was refused and has no node; it may be repeated."""
        with self._lock:
            if self._live.get(attempt.owner) is attempt:
                del self._live[attempt.owner]

    def drop_unsent(self, owner: str) -> bool:
        """Forget the attempt of an owner if its node was never asked for; returns whether so."""
        with self._lock:
            attempt = self._live.get(owner)
            if attempt is not None and not attempt.asked:
                del self._live[owner]
                return True
            return attempt is None and owner not in self._ends

    def join(
        self, attempt: Attempt, session: Session, state: Any, others: Sequence[LockNode]
    ) -> None:
        """Note its node, unless the session has been lost since."""
        with self._lock:
            if state.ephemeralOwner == session.id:
                attempt.session, attempt.token = session.id, state.czxid
                attempt.ahead = [other for other in others if other.token < state.czxid]

    def grant(
        self, attempt: Attempt, session: Session, asked_at: float, ttl: float
    ) -> Lease | None:
        """Note that it holds the name; ``None`` if it or its session has ended meanwhile."""
        with self._lock:
            if self._live.get(attempt.owner) is not attempt or attempt.session != session.id:
                return None
            attempt.until = max(attempt.until, asked_at + ttl)
            self._watch(attempt.until)
            return Lease(attempt.name, attempt.owner, attempt.token, ttl, asked_at)

    # -- renew -------------------------------------------------------------------------

    def find(self, owner: str) -> Attempt | Outcome:
        """The attempt of an owner, or how it has ended."""
        with self._lock:
            attempt = self._live.get(owner)
            if attempt is not None and attempt.until and clock.now() >= attempt.until:
                self._expire(attempt)
            if owner in self._live:
                return self._live[owner]
            end = self._ends.get(owner)
            return end.outcome if end else "refused"

    def renew(
        self, attempt: Attempt, renewal: Renewal, sent_at: float, ttl: float
    ) -> RenewalResult:
        """Prolong a lease whose node is there, unless it has ended meanwhile."""
        with self._lock:
            if self.find(attempt.owner) is not attempt:
                end = self._ends.get(attempt.owner)
                return RenewalResult(end.outcome if end else "refused")
            until = attempt.until
            if renewal.shorten > attempt.shortened:
                attempt.shortened, until = renewal.shorten, min(until, sent_at + renewal.ttl)
            attempt.until = max(until, sent_at + ttl)
            self._watch(attempt.until)
            return RenewalResult("renewed", ttl)

    def remaining(self, owner: str) -> float | None:
        """Seconds until the lease of this process ends; ``None`` if it has none."""
        attempt = self._live.get(owner)
        return max(0.0, attempt.until - clock.now()) if attempt and attempt.until else None

    # -- ends --------------------------------------------------------------------------

    def end(self, owner: str, outcome: Outcome, ttl: float = 0.0) -> None:
        """Remember how it ended; the first end counts."""
        with self._lock:
            attempt = self._live.pop(owner, None)
            ttl = attempt.ttl if attempt else ttl
            now = clock.now()
            self._ends.setdefault(owner, _End(outcome, now + ttl + MEMORY))
            # The oldest first; those with a long TTL may keep a few younger ones for longer.
            while self._ends:
                oldest = next(iter(self._ends))
                if now < self._ends[oldest].forget_at:
                    break
                del self._ends[oldest]

    def end_session(self) -> list[str]:
        """All nodes are gone with their session; returns the owners whose leases are lost by it."""
        with self._lock:
            lost = []
            for attempt in list(self._live.values()):
                if not attempt.until:
                    # It was never granted, and may join the queue again.
                    attempt.node_gone()
                    continue
                # The holder wanted its end anyway.
                outcome: Outcome = "released" if attempt.releasing else "expired"
                self.end(attempt.owner, outcome)
                if outcome == "expired":
                    lost.append(attempt.owner)
            self._expired.clear()
            return lost

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held or asked for."""
        return not self._live

    # -- the thread that ends leases with their TTL ------------------------------------

    def _expire(self, attempt: Attempt) -> None:
        # Record its end first, then delete the node, so that a renewal under way learns of the end.
        self.end(attempt.owner, "expired")
        self._expired.append(attempt)
        self._watch(clock.now())

    def _watch(self, until: float) -> None:
        """Wake the thread by then."""
        if self._thread is None or not self._thread.is_alive():
            self._wakes_at = until
            self._thread = threading.Thread(target=self._run, name="dlock-zookeeper", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                # The interpreter ends, and the session with it.
                self._thread = None
        elif until < self._wakes_at:
            self._changed.notify_all()

    def _run(self) -> None:
        idle_since = clock.now()
        while True:
            with self._lock:
                now = clock.now()
                for attempt in list(self._live.values()):
                    if attempt.until and now >= attempt.until:
                        self._expire(attempt)
                expired = list(self._expired)
            gone = self._delete_all(expired)
            with self._lock:
                self._expired = [each for each in self._expired if each not in gone]
                ends = [each.until for each in self._live.values() if each.until]
                now = clock.now()
                if ends or self._expired:
                    idle_since = now
                elif now - idle_since >= IDLE:
                    self._thread = None
                    return
                if self._expired:
                    ends.append(now + AGAIN)
                self._wakes_at = min(ends, default=idle_since + IDLE)
                self._changed.wait(max(0.0, self._wakes_at - now))

    def _delete_all(self, expired: Sequence[Attempt]) -> list[Attempt]:
        gone = []
        for attempt in expired:
            if not self.delete(attempt):
                # There is no answer, so there will be none for the others.
                break
            gone.append(attempt)
        return gone
