"""When a process switches by itself: slowly, and only if no process reaches the active store.

One process that cannot reach the store must not take it away from the others. So each process
notes in the record when the active store has answered it, and none switches as long as another one
has an answer.
"""

from __future__ import annotations

from ... import clock
from .config import FailoverOptions
from .record import Reading

__all__ = ["Health"]


class Health:
    """What this process has seen of both stores in the present epoch."""

    def __init__(self, options: FailoverOptions) -> None:
        self._options = options
        self._epoch = 0
        self.failing_since: float | None = None
        self._good_since: float | None = None

    @property
    def may_fail_back(self) -> bool:
        """Whether the primary must be asked while the standby is active."""
        return self._options.failback_after is not None

    def begin(self, reading: Reading) -> None:
        """Forget what was seen in an epoch that is over."""
        if reading.epoch != self._epoch:
            self._epoch, self.failing_since, self._good_since = reading.epoch, None, None

    def must_note(self, reading: Reading) -> bool:
        """Whether an answer of the active store is to be noted in the record."""
        after = self._options.failover_after
        return after is not None and reading.silent_for > after / 4

    def active_answered(self) -> None:
        self.failing_since = None

    def active_failed(self, reading: Reading) -> bool:
        """Returns whether it has failed for long enough, for this process and for all others."""
        now, after = clock.now(), self._options.failover_after
        if self.failing_since is None:
            self.failing_since = now
        if after is None:
            return False
        return now - self.failing_since >= after and reading.silent_for >= after

    def primary_answered(self, answered: bool) -> bool:
        """Returns whether the primary has answered for long enough to become active again."""
        now, after = clock.now(), self._options.failback_after
        if not answered:
            self._good_since = None
            return False
        if self._good_since is None:
            self._good_since = now
        return after is not None and now - self._good_since >= after
