"""The deadlocks that ``list_locks`` names: who holds what, and waits for what."""

from __future__ import annotations

from collections.abc import Iterator

from ..operators.blocking import NAMES, WAITERS_OF_EACH, Blocking, LockId, Survey, survey
from ..operators.inspection import AliasQuery, duration
from ..text.printable import printable
from .table import who

LINKS = 20
"""How many locks of one deadlock are named."""


class Deadlocks:
    """The deadlocks among the locks of some aliases, as far as the limits of ``survey`` reach.

    Args:
        shown: Only deadlocks that one of these locks is part of.
    """

    def __init__(self, alias_query: AliasQuery, shown: set[LockId]) -> None:
        self._several_aliases = len(alias_query.aliases) > 1
        self.survey: Survey = survey(alias_query)
        self._blocking: Blocking = self.survey.blocking
        self.circles = [it for it in self._blocking.deadlocks if not shown.isdisjoint(it)]
        self.locks = {lock for circle in self.circles for lock in circle}

    def of(self, lock: LockId) -> list[dict[str, str]] | None:
        """For JSON: the circle from this lock on; each holder waits for the next lock."""
        for circle in self.circles:
            if lock in circle:
                start = circle.index(lock)
                ordered = [*circle[start:], *circle[:start]]
                return [{"alias": alias, "name": name} for alias, name in ordered]
        return None

    def texts(self) -> Iterator[str]:
        """One for each deadlock."""
        for circle in self.circles:
            pairs = list(zip(circle, [*circle[1:], circle[0]], strict=True))
            links = [
                f"{self._holder(lock)} holds {'that' if number else self._name(lock)} and waits "
                f"{self._waited(lock, after)} for {self._name(after)}"
                for number, (lock, after) in enumerate(pairs[:LINKS])
            ]
            if len(pairs) > LINKS:
                links.append(f"and {len(pairs) - LINKS} more")
            text = "; ".join(links)
            yield printable(
                f'Deadlock: {text}. Stop one of them; see "Who blocks whom" in the admin.'
            )
        if self.circles and not self.survey.is_complete:
            yield (
                f"There may be more: at most {NAMES} locks of each alias were looked through, and "
                f"{WAITERS_OF_EACH} waiters of each lock."
            )

    def _holder(self, lock: LockId) -> str:
        return who(self._blocking.leases[lock].as_dict()["holder"])

    def _waited(self, lock: LockId, after: LockId) -> str:
        waits = self._blocking.waits_for(lock)
        return duration(next(it.waited for it in waits if (it.alias, it.name) == after))

    def _name(self, lock: LockId) -> str:
        alias, name = lock
        return f"{name!r} (alias {alias!r})" if self._several_aliases else repr(name)
