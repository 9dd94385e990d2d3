"""What goes around the call that gives a lease back, for threads and coroutines alike.

No flow as that of an acquire is: others wait for what a release says, and nothing of it is said
before the flow has been made and driven.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from . import clock, events, signals, undo, watchdog
from .exceptions import BackendUnavailable
from .hold import Hold
from .holdings import Holdings
from .lease import Fate, LeaseRequest

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GivingBack"]

# After these the backend has nothing of ours left to be released.
_NOTHING_TO_RELEASE = ("broken", "exit", "fork", "refused")


class GivingBack:
    """A context manager: inside, the backend is told, if ``asks``; afterwards it is over.

    Unless an interrupt strikes its own beginning or end, for which there is ``end``.

    Attributes:
        asks: Whether the backend may have anything to be released.
        fate: What it answered.

    Raises:
        LeaseLost: At the end; the lease was already gone.
        BackendUnavailable: At the end, where the backend raised it. The release is repeated in
            the background, as after any other exception.
    """

    __slots__ = ("_hold", "_holdings", "_reason", "asks", "fate")

    fate: Fate

    def __init__(self, hold: Hold, holdings: Holdings) -> None:
        self._hold, self._holdings = hold, holdings
        self._reason = reason = hold.lost_reason
        self.asks, self.fate = reason not in _NOTHING_TO_RELEASE, "refused"

    def __enter__(self) -> Self:
        # From here on it is renewed no more, whatever happens.
        watchdog.unwatch(self._hold)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        hold, known = self._hold, self._reason is not None
        try:
            if error is not None:
                self.leave_to_undo()
                if not (known and isinstance(error, BackendUnavailable)):
                    return False
            elif not known and self.fate == "released":
                if hold.end_released() and events.heard(signals.released, hold.sender):
                    held_for = clock.now() - hold.acquired_at
                    events.send(signals.released, hold.sender, held_for=held_for, **hold.facts())
            elif not known:
                hold.lose_by_fate(self.fate)
        finally:
            lost = hold.state == "lost"
            self._holdings.drop(hold, lost=lost)
        if lost:
            raise hold.end_error()
        return True

    def leave_to_undo(self) -> None:
        """It may be done or not, and nobody waits for it: it is done in the background."""
        hold = self._hold
        request = LeaseRequest(hold.name, hold.owner, hold.ttl)
        undo.schedule(hold.backend, request, min_hold=hold.min_hold)
        hold.end_released()

    def end(self) -> None:
        """See to it that it is over, whatever was struck and when; does nothing where it is."""
        if not self._hold.ended:
            self.leave_to_undo()
        self._holdings.drop(self._hold, lost=self._hold.state == "lost")
