"""When the leases of one backend are due: the watchdog's memory, without thread or I/O.

Any thread may add or remove a lease, which changes one entry of a dictionary. The renewal thread
does everything else. Its cost grows with what is due, not with what is held.
"""

from __future__ import annotations

import heapq
import math
from operator import attrgetter

from .held_lease import HeldLease
from .registry import HolderKey, holder_ended

PASSED_OVER = 64
"""How many leases that are not due soon are skipped in search of others to renew together."""

_UNPLANNED = -math.inf
_UNDER_WAY = math.inf
"""``due`` of a lease that is ready to be renewed, or whose renewal was sent. Its doubt and its end
must still be noticed."""


class Schedule:
    """See the module.

    Args:
        batch: The most leases that are renewed in one call.

    Attributes:
        leases: By owner; a lease that is not in it is not renewed.
        fresh: Leases that were added and have not been planned yet.
        ready: To be renewed now, the most urgent last.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.leases: dict[str, HeldLease] = {}
        self.fresh: dict[str, HeldLease] = {}
        self.ready: list[HeldLease] = []
        # A heap. It has owners, not leases, so that released leases are not kept in memory.
        self._times: list[tuple[float, str]] = []
        self._key: HolderKey = None
        self._key_ended = False

    def discard(self, held: HeldLease) -> None:
        """Stop planning a lease; from any thread."""
        # In this order, because ``collect_due`` moves it from the first to the second.
        self.fresh.pop(held.owner, None)
        self.leases.pop(held.owner, None)

    def collect_due(self, now: float) -> list[HeldLease]:
        """End what must end, and make ready what must be renewed; returns the latter."""
        self._admit()
        self._key, self._key_ended = None, False
        due: list[HeldLease] = []
        later: list[HeldLease] = []
        while self._times and self._times[0][0] <= now:
            held = self._pop()
            if held is not None and self._lives(held, now):
                (due if held.due <= now and held.due < held.deadline else later).append(held)
        for held in later:
            self.plan(held)
        for held in due:
            held.due = _UNDER_WAY
        if due:
            self.ready += due
            self.ready.sort(key=attrgetter("deadline"), reverse=True)
        return due

    def take(self, now: float) -> list[HeldLease]:
        """The next leases to renew in one call, the most urgent first.

        If there is room, leases that are due soon are renewed with them.
        """
        batch: list[HeldLease] = []
        while self.ready and not batch:
            taken = self.ready[: -self._batch - 1 : -1]
            del self.ready[-self._batch :]
            for held in taken:
                if self.leases.get(held.owner) is not held:
                    continue
                if held.ended:
                    self.discard(held)
                elif held.due == _UNDER_WAY:
                    batch.append(held)
                else:
                    # It was renewed by its holder, or is not to be renewed any more.
                    self.plan(held)
        if batch and len(batch) < self._batch:
            self._fill_up(batch, now)
        return batch

    def plan(self, held: HeldLease) -> None:
        """Note when the lease needs attention next."""
        time = held.next_time()
        if held.planned != time:
            held.planned = time
            heapq.heappush(self._times, (time, held.owner))

    def wait_with(self, leases: list[HeldLease]) -> None:
        """Plan leases that wait for an answer: their doubts and ends must be noticed."""
        for held in leases:
            held.failures += 1
            self.plan(held)

    def next_time(self) -> float:
        """When the next lease needs attention; infinite if there is none."""
        return self._times[0][0] if self._times else math.inf

    def doubt_all(self, now: float) -> None:
        """Put all renewed leases in doubt, and renew them now: the store does not answer."""
        self._admit()
        for held in self.leases.copy().values():
            if held.doubt(now) and held.due != _UNDER_WAY:
                held.due = min(held.due, now)
                self.plan(held)

    def start_over(self, now: float) -> None:
        """Plan everything anew after an error."""
        self._times, self.ready = [], []
        for held in self.leases.copy().values():
            if held.due == _UNDER_WAY:
                held.due = now
            held.planned = _UNPLANNED
            self.plan(held)

    def _pop(self) -> HeldLease | None:
        """The lease that is next, unless it was discarded or planned for another time."""
        time, owner = heapq.heappop(self._times)
        held = self.leases.get(owner)
        if held is None or held.planned != time:
            return None
        held.planned = _UNPLANNED
        return held

    def _admit(self) -> None:
        for owner, held in self.fresh.copy().items():
            self.leases[owner] = held
            if self.fresh.pop(owner, None) is None:
                # It was discarded between these lines.
                self.leases.pop(owner, None)
            else:
                held.planned = _UNPLANNED
                self.plan(held)

    def _lives(self, held: HeldLease, now: float) -> bool:
        """Whether it is still active; stops renewing a lease whose holder is gone."""
        if held.ended or (now >= held.deadline and not held.active):
            self.leases.pop(held.owner, None)
            return False
        if held.renews:
            # Often many leases in a row have the same holder.
            if held.key is not self._key:
                self._key, self._key_ended = held.key, holder_ended(held.key)
            if held.collected:
                held.stop_renewing("collected")
            elif self._key_ended:
                held.stop_renewing("holder_ended")
            else:
                held.report_doubt(now)
                if held.late:
                    held.release_overdue()
        return True

    def _fill_up(self, batch: list[HeldLease], now: float) -> None:
        later: list[HeldLease] = []
        while self._times and len(batch) < self._batch and len(later) < PASSED_OVER:
            held = self._pop()
            if held is None:
                continue
            if held.due_soon(now) and self._lives(held, now) and held.due < held.deadline:
                held.due = _UNDER_WAY
                batch.append(held)
            elif not held.ended:
                later.append(held)
        for held in later:
            self.plan(held)
