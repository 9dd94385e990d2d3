"""When the holds of one backend need attention: the watchdog's memory, without thread or I/O.

Any thread enters a hold and takes it out again, each at the price of a dictionary entry. All else
is done by the renewal thread. Many holds share a moment, so that a look costs as much as is due
and not as much as is held.
"""

from __future__ import annotations

import heapq
import math
from operator import attrgetter

from .hold import Hold, HolderKey, holder_ended

__all__ = ["BATCH", "Schedule"]

BATCH = 500
"""Leases renewed in one call."""
MOMENTS_AHEAD = 64
"""How far ahead others are looked for that fill a call up."""

_UNPLANNED = -math.inf
_UNDER_WAY = math.inf
"""``due`` of a hold that waits for its turn or its answer: its doubt and its end are to be told
all the same."""


class Schedule:
    """See the module.

    Attributes:
        holds: By owner; what is not in it is not renewed.
        fresh: Those that came since the last look.
        ready: To be renewed now, the most urgent last.
    """

    __slots__ = ("_key", "_key_ended", "_moments", "_owners", "fresh", "holds", "ready")

    def __init__(self) -> None:
        self.holds: dict[str, Hold] = {}
        self.fresh: dict[str, Hold] = {}
        self.ready: list[Hold] = []
        # By moment, with a heap of the moments. Owners and not holds, lest one that was released
        # be kept until its moment comes.
        self._owners: dict[float, list[str]] = {}
        self._moments: list[float] = []
        self._key: HolderKey = None
        self._key_ended = False

    def discard(self, hold: Hold) -> None:
        """Forget a hold; from any thread."""
        # In this order, for ``look`` moves it from the one to the other.
        self.fresh.pop(hold.owner, None)
        self.holds.pop(hold.owner, None)

    def look(self, now: float) -> list[Hold]:
        """End what must end, and make ready what is to be renewed; gives the latter."""
        self._admit()
        self._key, self._key_ended = None, False
        due: list[Hold] = []
        later: list[Hold] = []
        while self._moments and self._moments[0] <= now:
            moment = heapq.heappop(self._moments)
            for owner in self._owners.pop(moment):
                hold = self.holds.get(owner)
                # It was discarded, or planned for another moment since.
                if hold is None or hold.planned != moment:
                    continue
                hold.planned = _UNPLANNED
                if self._lives(hold, now):
                    (due if hold.due <= now and hold.due < hold.deadline else later).append(hold)
        for hold in later:
            self.plan(hold)
        for hold in due:
            hold.due = _UNDER_WAY
        if due:
            self.ready += due
            self.ready.sort(key=attrgetter("deadline"), reverse=True)
        return due

    def take(self, now: float) -> list[Hold]:
        """The next holds to renew in one call, the most urgent first; they are under way then.

        Whoever comes due soon goes along while there is room.
        """
        batch: list[Hold] = []
        while self.ready and not batch:
            taken = self.ready[: -BATCH - 1 : -1]
            del self.ready[-BATCH:]
            for hold in taken:
                if self.holds.get(hold.owner) is not hold:
                    continue
                if hold.ended:
                    self.discard(hold)
                elif hold.due == _UNDER_WAY:
                    batch.append(hold)
                else:
                    # Renewed by hand, or to be renewed no more, while it waited here.
                    self.plan(hold)
        if batch and len(batch) < BATCH:
            self._fill_up(batch, now)
        return batch

    def plan(self, hold: Hold) -> None:
        """Look at it when it next needs that."""
        moment = hold.next_look()
        if hold.planned == moment:
            return
        hold.planned = moment
        owners = self._owners.get(moment)
        if owners is None:
            self._owners[moment] = owners = []
            heapq.heappush(self._moments, moment)
        owners.append(hold.owner)

    def wait_with(self, holds: list[Hold]) -> None:
        """These wait for an answer, or behind those who do: their doubts and ends go on."""
        for hold in holds:
            hold.failures += 1
            self.plan(hold)

    def next_look(self) -> float:
        """When to look again; infinite for never."""
        while self._moments and not self._owners[self._moments[0]]:
            del self._owners[heapq.heappop(self._moments)]
        return self._moments[0] if self._moments else math.inf

    def start_over(self, now: float) -> None:
        """Plan everything anew, whatever was under way when it went wrong."""
        self._owners, self._moments, self.ready = {}, [], []
        for hold in self.holds.copy().values():
            if hold.due == _UNDER_WAY:
                hold.due = now
            hold.planned = _UNPLANNED
            self.plan(hold)

    def _admit(self) -> None:
        for owner, hold in self.fresh.copy().items():
            self.holds[owner] = hold
            if self.fresh.pop(owner, None) is None:
                # Discarded between the two.
                self.holds.pop(owner, None)
            else:
                hold.planned = _UNPLANNED
                self.plan(hold)

    def _lives(self, hold: Hold, now: float) -> bool:
        """Whether it is active still; one without a holder ends by itself from now on."""
        if hold.ended or (now >= hold.deadline and not hold.active):
            self.holds.pop(hold.owner, None)
            return False
        if hold.renews:
            # Most of the holds in a row have one holder.
            if hold.key is not self._key:
                self._key, self._key_ended = hold.key, holder_ended(hold.key)
            if hold.handle() is None:
                hold.stop_renewing("collected")
            elif self._key_ended:
                hold.stop_renewing("holder_ended")
            else:
                hold.tell_doubt(now)
        return True

    def _fill_up(self, batch: list[Hold], now: float) -> None:
        for moment in heapq.nsmallest(MOMENTS_AHEAD, self._moments):
            owners = self._owners[moment]
            while owners and len(batch) < BATCH:
                hold = self.holds.get(owners[-1])
                if hold is None or hold.planned != moment:
                    owners.pop()
                    continue
                if not hold.due_soon(now):
                    break
                owners.pop()
                hold.planned = _UNPLANNED
                if self._lives(hold, now) and hold.due < hold.deadline:
                    hold.due = _UNDER_WAY
                    batch.append(hold)
                elif not hold.ended:
                    self.plan(hold)
