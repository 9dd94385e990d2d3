"""Who blocks whom: the holders that wait for other locks, and the deadlocks among them.

A holder waits for another lock if one of that lock's waiters says that it holds this lease; see
``Waiter.holding``. So a chain may lead through several aliases and processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from . import clock
from .backends.base import BaseLockBackend
from .inspection import AliasQuery
from .lease import OWNER_PART, LeaseInfo, LeaseQuery, Waiter

__all__ = ["Blocking", "Line", "Place", "Survey", "survey"]

Place: TypeAlias = tuple[str, str]
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
    place: Place
    lease: LeaseInfo | None = None
    waiter: Waiter | None = None
    in_deadlock: bool = False
    repeated: bool = False
    more: int = 0


class Blocking:
    """The locks that were read, and the waiters of some of them.

    Args:
        waiters: The waiters of each lock in the order of arrival; locks without waiters may be
            missing. The most important lock comes first in the lists.
    """

    def __init__(
        self, leases: Iterable[LeaseInfo], waiters: Mapping[Place, Sequence[Waiter]]
    ) -> None:
        self.leases = {(info.alias, info.name): info for info in leases}
        self.waiters = {place: list(found) for place, found in waiters.items() if found}
        # Parked and reserved leases have no caller that could wait, and the dead do not wait.
        self._by_owner = {
            info.owner[:OWNER_PART]: place
            for place, info in self.leases.items()
            if info.kind == "held" and info.holder_state != "dead"
        }
        self._waits_for: dict[Place, list[Waiter]] = {}
        for found in self.waiters.values():
            for waiter in found:
                for place in self.held_by(waiter):
                    self._waits_for.setdefault(place, []).append(waiter)
        self.deadlocks = self._deadlocks()
        """The locks of each deadlock: the holder of each one waits for the next one, and that of
        the last one for the first one."""
        self._in_deadlock = {place for deadlock in self.deadlocks for place in deadlock}

    def held_by(self, waiter: Waiter) -> list[Place]:
        """The locks that the waiter holds; none if its process is dead, as it waits no more."""
        if waiter.state == "dead":
            return []
        found = (self._by_owner.get(owner) for owner in waiter.holding)
        return [place for place in found if place is not None]

    def waits_for(self, place: Place) -> list[Waiter]:
        """What the holder of the lock waits for: itself, as a waiter of other locks."""
        return self._waits_for.get(place, [])

    def chain(self, place: Place) -> list[Waiter]:
        """What the holder waits for, what the holder of that waits for, and so on.

        In a deadlock, it ends with the wait that closes the circle.
        """
        found, seen = list[Waiter](), {place}
        while waits := self.waits_for(place):
            found.append(waits[0])
            place = waits[0].alias, waits[0].name
            if place in seen:
                break
            seen.add(place)
        return found

    def lines(self) -> list[Line]:
        """All locks that somebody waits for.

        Those whose holder waits for nothing are at the left, because they block all others.
        """
        found: list[Line] = []
        seen: set[Place] = set()
        first = [place for place in self.waiters if not self.waits_for(place)]
        for place in (*first, *(deadlock[0] for deadlock in self.deadlocks), *self.waiters):
            if place not in seen:
                found.extend(self._lines_of(place, seen))
        return found

    def _lines_of(self, place: Place, seen: set[Place]) -> Iterator[Line]:
        # Without recursion, because a chain may be long.
        to_do: list[Line] = [Line(0, place)]
        while to_do:
            line = to_do.pop()
            if line.waiter is not None:
                yield line
                continue
            place, waiters = line.place, self.waiters.get(line.place, [])
            lease, repeated = self.leases.get(place), place in seen
            more = max(0, lease.waiting - len(waiters)) if lease and waiters else 0
            yield Line(
                line.depth,
                place,
                lease,
                in_deadlock=place in self._in_deadlock,
                repeated=repeated and bool(waiters),
                more=0 if repeated else more,
            )
            if repeated:
                continue
            seen.add(place)
            for waiter in reversed(waiters):
                holds = self.held_by(waiter)
                to_do += [Line(line.depth + 2, each) for each in reversed(holds)]
                stuck = place in self._in_deadlock and any(it in self._in_deadlock for it in holds)
                to_do.append(Line(line.depth + 1, place, waiter=waiter, in_deadlock=stuck))

    def _deadlocks(self) -> list[list[Place]]:
        """One circle for each lock that is in one and not in an earlier one."""
        found: list[list[Place]] = []
        known: set[Place] = set()
        for place in self._candidates():
            if place not in known and (circle := self._circle(place)):
                known.update(circle)
                found.append(circle)
        return found

    def _candidates(self) -> list[Place]:
        """The locks whose holders wait, without those from which no circle can be reached."""
        after = {
            place: {(it.alias, it.name) for it in waits} for place, waits in self._waits_for.items()
        }
        before: dict[Place, list[Place]] = {}
        for place, nexts in after.items():
            for each in nexts:
                before.setdefault(each, []).append(place)
        ends = deque(place for place in before if place not in after)
        while ends:
            end = ends.popleft()
            for place in before.get(end, []):
                after[place].discard(end)
                if not after[place]:
                    ends.append(place)
        return [place for place, nexts in after.items() if nexts]

    def _circle(self, start: Place) -> list[Place]:
        """The shortest way from a lock back to it; empty if there is none."""
        came_from: dict[Place, Place] = {}
        to_do = deque([start])
        while to_do:
            place = to_do.popleft()
            for waiter in self.waits_for(place):
                after = waiter.alias, waiter.name
                if after == start:
                    circle = [place]
                    while circle[-1] != start:
                        circle.append(came_from[circle[-1]])
                    return circle[::-1]
                if after not in came_from:
                    came_from[after] = place
                    to_do.append(after)
        return []


class Survey(NamedTuple):
    """What was read of several aliases.

    Attributes:
        names_read: Locks whose waiters were read.
        is_complete: Whether these are all locks that somebody waits for, with all their waiters.
    """

    blocking: Blocking
    names_read: int
    is_complete: bool


def survey(
    alias_query: AliasQuery, *, names: int = 100, waiters: int = 20, seconds: float = 3.0
) -> Survey:
    """Read the locks that most wait for, and who waits for them.

    Args:
        alias_query: The aliases; its ``problems`` say which of them did not answer.
        names: The most locks of each alias.
        waiters: The most waiters of each lock.
        seconds: Ask no more once so much time has passed.
    """
    until = clock.now() + seconds
    by_waiting = LeaseQuery(sort=("-waiting",))
    pages = alias_query.ask(lambda backend: backend.page(by_waiting, limit=names))
    infos = [info for page in pages.values() for info in page.infos]
    infos.sort(key=lambda info: -info.waiting)
    found: dict[Place, list[Waiter]] = {}

    def read(backend: BaseLockBackend) -> None:
        for info in infos:
            if info.alias == backend.alias and info.waiting and clock.now() < until:
                found[info.alias, info.name] = backend.waiters(info.name, limit=waiters)

    alias_query.ask(read)
    is_complete = all(
        len(page.infos) == page.total or not page.infos[-1].waiting for page in pages.values()
    ) and all(len(found.get((info.alias, info.name), ())) >= info.waiting for info in infos)
    # In the order of the locks.
    ordered = {(i.alias, i.name): found.get((i.alias, i.name), []) for i in infos}
    return Survey(Blocking(infos, ordered), len(found), is_complete)
