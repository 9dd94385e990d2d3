"""What a handle can tell of its hold without asking anybody."""

from __future__ import annotations

from .backends.base import BaseLockBackend
from .exceptions import LeaseLost, NotHeld
from .hold import Hold, LockState
from .holdings import Holdings
from .lease import Contention

__all__ = ["LockView"]


class LockView:
    """The questions of a ``Lock``; none of them does I/O.

    Attributes:
        name: The lock's name.
        contention: The last holder that an acquire of this handle met.
    """

    __slots__ = ("__weakref__", "_backend", "_holdings", "contention", "name")

    def __init__(self, name: str, backend: BaseLockBackend, holdings: Holdings) -> None:
        self.name = name
        self.contention: Contention | None = None
        self._backend = backend
        self._holdings = holdings

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} on {self.alias!r}: {self.state}>"

    @property
    def alias(self) -> str:
        """The alias in ``DLOCKS``."""
        return self._backend.alias

    @property
    def state(self) -> LockState:
        """``free``, ``held``, ``in_doubt`` (nothing confirmed for half the TTL) or ``lost``."""
        hold = self._holdings.mine()
        return "free" if hold is None else hold.state

    @property
    def held(self) -> bool:
        """Whether the lease is ours as far as can be known here; true in doubt."""
        hold = self._holdings.mine()
        return hold is not None and hold.active

    @property
    def lost(self) -> bool:
        """Whether the lease ended under its holder."""
        return self.state == "lost"

    @property
    def lost_reason(self) -> str | None:
        """Why: ``expired``, ``refused``, ``broken``, ``max_hold``, ``unreachable``, ``fork``,
        ``exit``, ``holder_ended``, ``interrupted`` or ``collected``; ``None`` where it is not
        lost."""
        hold = self._holdings.mine()
        return None if hold is None else hold.lost_reason

    @property
    def remaining(self) -> float:
        """Seconds until the local deadline; 0 where it is not held."""
        hold = self._holdings.mine()
        return 0.0 if hold is None else hold.remaining

    @property
    def token(self) -> int | None:
        """The fencing token of this grant; ``None`` when free."""
        hold = self._holdings.mine()
        return None if hold is None else hold.token

    @property
    def owner(self) -> str | None:
        """The random owner of this grant; ``None`` when free."""
        hold = self._holdings.mine()
        return None if hold is None else hold.owner

    def check(self) -> None:
        """Return while held; costs under a microsecond.

        Raises:
            LeaseLost: The lease is gone.
            NotHeld: It was never acquired, or is released.
        """
        hold = self._holdings.mine()
        if hold is None:
            raise self._not_held("checked")
        if not hold.active:
            raise self._lost(hold)

    def _lost(self, hold: Hold) -> LeaseLost:
        reason = hold.lost_reason or "released"
        return LeaseLost(f"The lease is lost: {reason}", self.name, self.alias, reason)

    def _not_held(self, verb: str) -> NotHeld:
        return NotHeld(f"It is not held, so it cannot be {verb}", self.name, self.alias)
