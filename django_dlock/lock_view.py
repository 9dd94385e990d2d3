"""What a handle can tell of its hold without asking its backend, and do with its token."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

from .backends.base import BaseLockBackend
from .exceptions import NotHeld
from .hold import Hold, LockState
from .holdings import Holdings
from .lease import Contention

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet
    from django.db.models.manager import BaseManager

    from .fencing import FencedInstance, FencedQuerySet

__all__ = ["LockView"]


class LockView:
    """The questions of a ``Lock``, none of which does I/O, and its fences.

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
        # In few calls: it is asked within loops.
        hold = self._holdings.mine()
        if hold is None or not hold.active:
            self._checked("checked")

    # -- fencing -----------------------------------------------------------------------

    @overload
    def fence(
        self, target: QuerySet[Any, Any] | BaseManager[Any], field: str | None = None
    ) -> FencedQuerySet: ...

    @overload
    def fence(self, target: Model, field: str | None = None) -> FencedInstance: ...

    def fence(
        self,
        target: QuerySet[Any, Any] | BaseManager[Any] | Model,
        field: str | None = None,
    ) -> FencedQuerySet | FencedInstance:
        """Write rows only while no newer holder has written them.

        ``lock.fence(queryset).update(...)`` and ``lock.fence(instance).save(...)`` compare the
        token of this grant with the rows' ``FencingTokenField`` and raise it, in one statement.

        Args:
            field: Which one, where the model has several.

        Raises:
            LeaseLost, NotHeld: There is no lease, so there is no token to write with.
            TypeError: The model has no ``FencingTokenField``, or several and none is named.
        """
        from . import fencing

        return fencing.fence(self._checked("fenced"), target, field)

    def atomic(self, using: str | None = None) -> AbstractContextManager[None]:
        """A database transaction that cannot commit once a newer holder's has begun to.

        Its first and its last statement write this grant's token to the name's row in the fence
        table, if no newer one is there; the row stays locked until COMMIT. The lease must
        stand at the end, too.

        Args:
            using: Alias in ``DATABASES``; the one that routers give for ``Fence`` by default.

        Raises:
            StaleToken: A newer holder was here; everything is rolled back.
            LeaseLost, NotHeld: The lease is gone, at the beginning or at the end.
            RuntimeError: The database is in a transaction already, whose COMMIT would come
                after the last statement.
        """
        from . import fencing

        return fencing.atomic(self._checked("fenced"), using)

    def _checked(self, verb: str) -> Hold:
        """The hold that stands."""
        hold = self._holdings.mine()
        if hold is None:
            raise self._not_held(verb)
        hold.check()
        return hold

    def _not_held(self, verb: str) -> NotHeld:
        return NotHeld(f"It is not held, so it cannot be {verb}", self.name, self.alias)
