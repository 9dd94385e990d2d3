"""Who blocks whom: the holders that wait for other locks, and the deadlocks among them.

A holder waits for another lock if one of that lock's waiters says that it holds this lease; see
``Waiter.holding``. So a chain may lead through several aliases and processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .. import clock
from ..backends.base import BaseLockBackend
from ..lease import OWNER_PART, LeaseInfo, LeasePage, LeaseQuery, Waiter
from .inspection import AliasQuery

NAMES, WAITERS_OF_EACH = 100, 20
"""What pages and commands read of each alias to find out who waits for whom."""

LockId: TypeAlias = tuple[str, str]
"""The alias and the name of a lock."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the indented list: a lock, or, below it and one step to the right, a waiter.

    Below a waiter that holds locks are these locks.

    Attributes:
        depth: 0 for a lock at the left.
        lease: That of the lock; ``None`` if nobody holds it, or if it was not read.
        waiter: ``None`` in the line of a lock.
        in_deadlock: Whether the lock, or what the waiter holds, is part of a deadlock.
        repeated: Whether the lock's own waiters are elsewhere in the list.
        more: How many waiters of the lock were not read.
    """

    depth: int
    lock: LockId
    lease: LeaseInfo | None = None
    waiter: Waiter | None = None
    in_deadlock: bool = False
    repeated: bool = False
    more: int = 0


class Blocking:
    """The locks that were read, and the waiters of some of them.

    Args:
        waiters: The waiters of each lock in the order of arrival; locks without waiters may be
            missing. Locks that belong to the same group of ``lines`` keep this order.
    """

    def __init__(
        self, leases: Iterable[LeaseInfo], waiters: Mapping[LockId, Sequence[Waiter]]
    ) -> None:
        self.leases = {(info.alias, info.name): info for info in leases}
        self.waiters = {lock: list(found) for lock, found in waiters.items() if found}
        # Parked and reserved leases have no caller that could wait, and the dead do not wait.
        self._by_owner = {
            info.owner[:OWNER_PART]: lock
            for lock, info in self.leases.items()
            if info.kind == "held" and info.holder_state != "dead"
        }
        self._waits_for: dict[LockId, list[Waiter]] = {}
        for found in self.waiters.values():
            for waiter in found:
                for lock in self.held_by(waiter):
                    self._waits_for.setdefault(lock, []).append(waiter)
        self.deadlocks = self._deadlocks()
        """The locks of each deadlock: the holder of each one waits for the next one, and that of
        the last one for the first one."""
        self._in_deadlock = {lock for deadlock in self.deadlocks for lock in deadlock}

    def held_by(self, waiter: Waiter) -> list[LockId]:
        """The locks that the waiter holds; none if its process is dead, as it waits no more."""
        if waiter.state == "dead":
            return []
        found = (self._by_owner.get(owner) for owner in waiter.holding)
        return [lock for lock in found if lock is not None]

    def waits_for(self, lock: LockId) -> list[Waiter]:
        """What the holder of the lock waits for: its entries among the waiters of other locks."""
        return self._waits_for.get(lock, [])

    def chain(self, lock: LockId) -> list[Waiter]:
        """What the holder waits for, what the holder of that waits for, and so on.

        In a deadlock, it ends with the wait that closes the circle.
        """
        found, seen = list[Waiter](), {lock}
        while waits := self.waits_for(lock):
            found.append(waits[0])
            lock = waits[0].alias, waits[0].name
            if lock in seen:
                break
            seen.add(lock)
        return found

    def lines(self) -> list[Line]:
        """All locks that somebody waits for.

        Those whose holder waits for nothing are at the left, because they block all others.
        """
        found: list[Line] = []
        seen: set[LockId] = set()
        first = [lock for lock in self.waiters if not self.waits_for(lock)]
        for lock in (*first, *(deadlock[0] for deadlock in self.deadlocks), *self.waiters):
            if lock not in seen:
                found.extend(self._lines_of(lock, seen))
        return found

    def _lines_of(self, lock: LockId, seen: set[LockId]) -> Iterator[Line]:
        # Without recursion, because a chain may be long.
        to_do: list[Line] = [Line(0, lock)]
        while to_do:
            line = to_do.pop()
            if line.waiter is not None:
                yield line
                continue
            lock, waiters = line.lock, self.waiters.get(line.lock, [])
            lease, repeated = self.leases.get(lock), lock in seen
            more = max(0, lease.waiting - len(waiters)) if lease and waiters else 0
            yield Line(
                line.depth,
                lock,
                lease,
                in_deadlock=lock in self._in_deadlock,
                repeated=repeated and bool(waiters),
                more=0 if repeated else more,
            )
            if repeated:
                continue
            seen.add(lock)
            for waiter in reversed(waiters):
                holds = self.held_by(waiter)
                to_do += [Line(line.depth + 2, each) for each in reversed(holds)]
                stuck = lock in self._in_deadlock and any(it in self._in_deadlock for it in holds)
                to_do.append(Line(line.depth + 1, lock, waiter=waiter, in_deadlock=stuck))

    def _deadlocks(self) -> list[list[LockId]]:
        """One circle for each lock that is in a circle, but in none of those found before."""
        found: list[list[LockId]] = []
        known: set[LockId] = set()
        for lock in self._candidates():
            if lock not in known and (circle := self._circle(lock)):
                known.update(circle)
                found.append(circle)
        return found

    def _candidates(self) -> list[LockId]:
        """The locks whose holders wait, without those from which no circle can be reached."""
        after = {
            lock: {(it.alias, it.name) for it in waits} for lock, waits in self._waits_for.items()
        }
        before: dict[LockId, list[LockId]] = {}
        for lock, nexts in after.items():
            for each in nexts:
                before.setdefault(each, []).append(lock)
        ends = deque(lock for lock in before if lock not in after)
        while ends:
            end = ends.popleft()
            for lock in before.get(end, []):
                after[lock].discard(end)
                if not after[lock]:
                    ends.append(lock)
        return [lock for lock, nexts in after.items() if nexts]

    def _circle(self, start: LockId) -> list[LockId]:
        """The shortest way from a lock back to it; empty if there is none."""
        came_from: dict[LockId, LockId] = {}
        to_do = deque([start])
        while to_do:
            lock = to_do.popleft()
            for waiter in self.waits_for(lock):
                after = waiter.alias, waiter.name
                if after == start:
                    circle = [lock]
                    while circle[-1] != start:
                        circle.append(came_from[circle[-1]])
                    return circle[::-1]
                if after not in came_from:
                    came_from[after] = lock
                    to_do.append(after)
        return []


class Survey(NamedTuple):
    """What was read of several aliases.

    Attributes:
        names_read: Locks whose waiters were read.
        is_complete: Whether these are all locks that somebody waits for, with all their waiters.
        untold: The aliases whose store does not know who waits; the others are judged without them.
    """

    blocking: Blocking
    names_read: int
    is_complete: bool
    untold: Sequence[str] = ()


def survey(
    alias_query: AliasQuery,
    *,
    names: int = NAMES,
    waiters: int = WAITERS_OF_EACH,
    seconds: float = 3.0,
    pages: Mapping[str, LeasePage] | None = None,
) -> Survey:
    """Read the locks with the most waiters, and these waiters.

    Args:
        alias_query: The aliases; its ``problems`` say which of them did not answer.
        names: How many locks of each alias are read, at most.
        waiters: How many waiters of each lock are read, at most.
        seconds: Stop asking once this much time has passed.
        pages: The locks of each alias, if they have been read already.
    """
    until = clock.now() + seconds
    by_waiting = LeaseQuery(sort=("-waiting",))
    if pages is None:
        pages = alias_query.ask(lambda backend: backend.page(by_waiting, limit=names))
    infos = [info for page in pages.values() for info in page.infos]
    infos.sort(key=lambda info: -info.waiting)
    found: dict[LockId, list[Waiter]] = {}

    def read(backend: BaseLockBackend) -> None:
        for info in infos:
            if info.alias == backend.alias and info.waiting and clock.now() < until:
                found[info.alias, info.name] = backend.waiters(info.name, limit=waiters)

    def is_read(info: LeaseInfo) -> bool:
        if not info.waiting:
            return True
        there = found.get((info.alias, info.name))
        # Some may have gone after they were counted.
        return there is not None and (len(there) < waiters or len(there) >= info.waiting)

    if any(info.waiting for info in infos):
        alias_query.ask(read)
    is_complete = all(
        # A lease may have ended after it was counted and before it was read.
        len(page.infos) == page.total or (page.infos and not page.infos[-1].waiting)
        for page in pages.values()
    ) and all(map(is_read, infos))
    untold = {info.alias: None for info in infos if "waiting" in info.unknown}
    # In the order of the locks.
    ordered = {(i.alias, i.name): found.get((i.alias, i.name), []) for i in infos}
    return Survey(Blocking(infos, ordered), len(found), is_complete, list(untold))
