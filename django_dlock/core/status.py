"""What a ``Lock`` says of itself; does no I/O."""

from __future__ import annotations

from .held_lease import HeldLease, LockState
from .release import LockFlows


class LockStatus(LockFlows):
    """The state of a ``Lock``, as far as can be known in this process."""

    __slots__ = ()

    def __repr__(self) -> str:
        held = self._holds.mine()
        name = self._name if held is None else held.name
        return f"<Lock {name!r} on {self.alias!r}: {self.state}>"

    @property
    def state(self) -> LockState:
        """``free``, ``held``, ``in_doubt`` or ``lost``.

        In doubt is a lease to be renewed for which nothing was confirmed for half the TTL, or whose
        backend has reported that its store has gone away.
        """
        held = self._holds.mine()
        return "free" if held is None else held.state

    @property
    def held(self) -> bool:
        """Whether the lease is ours as far as can be known here; true in doubt."""
        held = self._holds.mine()
        return held is not None and held.active

    @property
    def lost(self) -> bool:
        """Whether the lease ended while held."""
        return self.state == "lost"

    @property
    def lost_reason(self) -> str | None:
        """``None``, or ``expired``, ``refused``, ``broken``, ``max_hold``, ``unreachable``,
        ``fork``, ``exit``, ``holder_ended``, ``interrupted`` or ``collected``."""
        held = self._holds.mine()
        return None if held is None else held.lost_reason

    @property
    def remaining(self) -> float:
        """Seconds until the local deadline; 0 if it is not held."""
        held = self._holds.mine()
        return 0.0 if held is None else held.remaining

    @property
    def token(self) -> int | None:
        """The fencing token of this grant; ``None`` when free, or locked in this process only."""
        held = self._holds.mine()
        return None if held is None else held.token

    @property
    def owner(self) -> str | None:
        """The random owner of this grant; ``None`` when free."""
        held = self._holds.mine()
        return None if held is None else held.owner

    def check(self) -> None:
        """Return while held; costs under a microsecond.

        Raises:
            LeaseLost: The lease is gone.
            NotHeld: It was never acquired, or is released.
        """
        # With few function calls, because it is called in loops.
        held = self._holds.mine()
        if held is None or not held.active:
            self._checked("checked")

    def _checked(self, verb: str) -> HeldLease:
        """The present lease.

        Raises:
            LeaseLost, NotHeld: There is none.
        """
        held = self._holds.mine() or self._current(verb).lease
        held.check()
        return held
