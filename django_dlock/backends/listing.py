"""What operators ask of a store that can list its leases; every other store may leave it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, get_args

from ..lease import HolderState, Kind, LeaseInfo, LeasePage, LeaseQuery, Waiter

# Named here because inside the class ``list`` is a method.
LeaseInfos = list[LeaseInfo]
Waiters = list[Waiter]


class Listing:
    """A store with the capability ``listing`` has ``page``, and ``waiters`` if it knows them."""

    alias: str
    capabilities: ClassVar[frozenset[str]]

    def require_listing(self) -> None:
        """Raise ``NotImplementedError``, whose text is for operators, without the capability."""
        if "listing" not in self.capabilities:
            raise self._cannot("list its locks")

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        """A page of the leases, including damaged ones, and the total number that the query finds.

        The total may include leases whose expiry has not been noticed yet.

        Args:
            limit: The most leases to return; ``None`` for all, 0 to count only.

        Raises:
            NotImplementedError: The backend is not capable of ``listing``.
        """
        raise self._cannot("list its locks")

    def list(
        self,
        *,
        prefix: str = "",
        contains: str = "",
        kind: str = "",
        holder_state: str = "",
        host: str = "",
        task: str = "",
        older_than: float = 0.0,
        sort: Sequence[str] = (),
        offset: int = 0,
        limit: int | None = None,
    ) -> LeaseInfos:
        """The present leases; see ``LeaseQuery``.

        Raises:
            ValueError: ``kind``, ``holder_state``, ``older_than`` or ``sort`` is not valid.
        """
        query = LeaseQuery(prefix, contains, kind, holder_state, sort, host, task, older_than)
        return self.page(_checked(query), offset=offset, limit=limit).infos

    def count(
        self,
        *,
        prefix: str = "",
        contains: str = "",
        kind: str = "",
        holder_state: str = "",
        host: str = "",
        task: str = "",
        older_than: float = 0.0,
    ) -> int:
        """How many leases ``list`` would return without a limit."""
        query = LeaseQuery(prefix, contains, kind, holder_state, (), host, task, older_than)
        return self.page(_checked(query), limit=0).total

    def waiters(self, name: str, *, limit: int = 100) -> Waiters:
        """Who waits for the name, whether it is held or not, in the order of arrival.

        One round trip, which reads ``limit`` waiters at most, none for 0. Waiters whose process is
        gone are among them until the store notices; ``Waiter.state`` tells them apart.

        Raises:
            BackendUnavailable: No answer.
            NotImplementedError: The backend does not know its waiters.
        """
        raise self._cannot("tell who waits for a lock")

    def _cannot(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"Alias {self.alias!r} cannot {what}")


def _checked(query: LeaseQuery) -> LeaseQuery:
    """Refuses what no lease can have, instead of finding nothing."""
    for field, choices in (("kind", get_args(Kind)), ("holder_state", get_args(HolderState))):
        if (value := getattr(query, field)) and value not in choices:
            raise ValueError(f"{field} is {value!r}; it takes one of {list(choices)}")
    return query
