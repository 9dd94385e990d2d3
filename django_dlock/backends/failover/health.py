"""When a process switches by itself: slowly, and only if no process is granted a lease any more.

One process that cannot reach the store must not take it away from the others. So processes note in
the record that the active store has granted a lease, and none switches as long as another one is
granted any.

If processes switch again and again, both stores fail in turn. Then each switch is made later than
the one before, because each one ends all leases.
"""

from __future__ import annotations

from ... import clock
from .config import FailoverOptions
from .record import Reading

NOTED_AGAIN = 1 / 4
"""The fraction of ``failover_after`` after which it is noted again that the store grants."""
LOOKED_BACK = 1 / 8
"""The fraction of ``failback_after`` after which the primary is tried again."""
LONGEST_PAUSE = 3600.0
"""Seconds; with one switch an hour, the epochs last for months."""


class Streak:
    """Tries of a store with the same result, none of which comes long after the one before.

    A process that uses no locks tries nothing, and so knows nothing of that time.

    Args:
        longest_gap: Seconds.
    """

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._since = self._last = float("-inf")

    def go_on(self) -> float:
        """Note another one; returns for how many seconds they have lasted."""
        now = clock.now()
        if not self.lasts():
            self._since = now
        self._last = now
        return now - self._since

    def lasts(self) -> bool:
        return clock.now() - self._last <= self._longest_gap

    def end(self) -> None:
        self._last = float("-inf")


class Health:
    """What this process has seen of both stores in the present epoch."""

    def __init__(self, options: FailoverOptions) -> None:
        self._options = options
        self._epoch = 0
        # Some reads of the record may fail or take their time.
        gap = 2 * options.view_ttl
        self._failures = Streak(max(gap, options.failover_after or 0.0))
        self._grants = Streak(gap + LOOKED_BACK * (options.failback_after or 0.0))
        self._looked_back_at = float("-inf")
        # Whether it was told that a switch is not made.
        self._told = False

    def begin(self, reading: Reading) -> None:
        """Forget what was seen in an epoch that is over."""
        if reading.epoch != self._epoch:
            self.__init__(self._options)  # type: ignore[misc]
            self._epoch = reading.epoch

    # -- the active store --------------------------------------------------------------

    def must_try(self, reading: Reading) -> bool:
        """Whether no process has noted of late that the active store grants."""
        after = self._options.failover_after
        return after is not None and reading.silent_for > after * NOTED_AGAIN

    @property
    def is_failing(self) -> bool:
        """Whether it has failed for this process, and not granted since."""
        return self._failures.lasts()

    def active_granted(self) -> None:
        if self.is_failing:
            self._failures.end()
            self._told = False

    def active_failed(self, reading: Reading) -> bool:
        """Returns whether it has failed for long enough, for this process and for all others."""
        lasted, after = self._failures.go_on(), self._options.failover_after
        if after is None:
            return False
        # A store that fails is not tried before somebody must note again that it grants.
        mine = lasted >= after * (1 - NOTED_AGAIN)
        return mine and reading.silent_for >= after

    # -- the primary while the standby is active -----------------------------------------

    def must_look_back(self) -> bool:
        """Whether the primary is to be tried now."""
        now, after = clock.now(), self._options.failback_after
        if after is None or now - self._looked_back_at < after * LOOKED_BACK:
            return False
        self._looked_back_at = now
        return True

    def primary_tried(self, granted: bool) -> bool:
        """Returns whether the primary has granted for long enough to become active again."""
        after = self._options.failback_after
        if not granted:
            self._grants.end()
            return False
        return after is not None and self._grants.go_on() >= after

    # -- switching ---------------------------------------------------------------------

    def may_switch(self, reading: Reading) -> bool:
        """Whether the last switch was long enough ago for another one."""
        return reading.elapsed >= pause_before(reading)

    def tells(self) -> bool:
        """Whether to tell that a switch is not made: once in an epoch."""
        told, self._told = self._told, True
        return not told


def pause_before(reading: Reading) -> float:
    """Seconds after the last switch before processes make another one by themselves."""
    if reading.in_a_row < 2:
        # To the standby, and back again.
        return 0.0
    return float(min(LONGEST_PAUSE, reading.quiet * 2 ** min(reading.in_a_row - 1, 20)))


def in_a_row_after(reading: Reading) -> int:
    """``in_a_row`` of a switch that a process makes now."""
    return reading.in_a_row + 1 if reading.elapsed < 2 * LONGEST_PAUSE else 1
