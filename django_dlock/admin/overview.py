"""What is wrong at first sight: the counts above the list of held locks, and the deadlocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from django.utils.translation import gettext, ngettext

from ..backends.base import BaseLockBackend
from ..lease import LeaseInfo, LeasePage, LeaseQuery
from ..operators.blocking import LockId, survey
from ..operators.inspection import AliasQuery
from ..text.printable import printable
from ..trouble import NO_TROUBLE, trouble

TROUBLE_FIRST = ("trouble", "-age")
OLDEST_FIRST = ("-age",)

READ = 100
"""How many locks of each alias are read, at least: those in the most trouble."""
MOST = 10_000
"""An alias with more locks is not looked through: every open page would do so every 5 seconds."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One count, which is a link to the locks that it counts.

    Attributes:
        number: The count as text, also where it is not exact or not known.
        hint: What a count of more than 0 means; empty unless it is a problem.
        style: The name of a colour in ``admin.css``.
        params: The filters of the list that shows these locks.
    """

    name: str
    number: str
    style: str
    hint: str
    params: Mapping[str, str]

    @property
    def parts(self) -> list[str]:
        """The digits of the number and the words around them, in the order of the language."""
        return [part for part in re.split(r"(\d+)", self.number) if part]

    @property
    def has_digits(self) -> bool:
        return any(part.isdigit() for part in self.parts)

    @property
    def query_string(self) -> str:
        return "?" + urlencode(self.params)


class Overview:
    """The counts over all aliases, and the locks in a deadlock.

    Each alias is asked for its number of locks and for those in the most trouble, and then for the
    waiters of the locks that can be part of a deadlock, within the limits of ``survey``.

    Args:
        alias_query: All aliases. One that fails is not asked again.
        size: How many locks of each alias are read, at least.

    Attributes:
        pages: The first locks of each alias that answered, in the order ``TROUBLE_FIRST``.
        size: How many locks a page has, at most.
        deadlocked: The locks that are part of a deadlock.
        crowded: The aliases with more than ``MOST`` locks; nothing else is known of them.
    """

    def __init__(self, alias_query: AliasQuery, size: int) -> None:
        self.size = max(READ, size)
        self.crowded: list[str] = []
        self._problems = alias_query.problems
        self.pages = alias_query.ask(self._read)
        self._untold = [
            alias
            for alias, page in self.pages.items()
            if any("waiting" in info.unknown for info in page.infos)
        ]
        self._waited_for: dict[str, int] = {}
        found = survey(alias_query, pages=alias_query.ask(self._candidates))
        # It may have failed since.
        self.pages = {a: page for a, page in self.pages.items() if a not in self._problems}
        self._deadlocks = found.blocking.deadlocks
        self._is_surveyed = found.is_complete
        leases = found.blocking.leases
        self.deadlocked: dict[LockId, LeaseInfo] = {
            lock: leases[lock] for circle in self._deadlocks for lock in circle
        }

    # -- reading -------------------------------------------------------------------------

    def _read(self, backend: BaseLockBackend) -> LeasePage:
        _none, total = backend.page(LeaseQuery(), limit=0)
        if total > MOST:
            self.crowded.append(backend.alias)
            return LeasePage([], total)
        return backend.page(LeaseQuery(sort=TROUBLE_FIRST), limit=self.size)

    def _candidates(self, backend: BaseLockBackend) -> LeasePage:
        """The locks that can be part of a deadlock; asks the store only if some were not read."""
        page = self.pages[backend.alias]
        if backend.alias in self.crowded:
            return page
        if not self._has_all(backend.alias, NO_TROUBLE - 1):
            query = LeaseQuery(waiting=True, sort=("-waiting",))
            page = backend.page(query, limit=READ)
        waited_for = [info for info in page.infos if info.waiting]
        left_out = page.total - len(page.infos) if page is not self.pages[backend.alias] else 0
        self._waited_for[backend.alias] = len(waited_for) + left_out
        infos = [info for info in waited_for if info.kind == "held" and info.holder_state != "dead"]
        return LeasePage(infos, len(infos) + left_out)

    def _has_all(self, alias: str, most_trouble: int) -> bool:
        """Whether all locks of an alias were read whose ``trouble`` is at most this."""
        infos, total = self.pages[alias]
        if alias in self.crowded:
            return False
        return total <= self.size or (bool(infos) and trouble(infos[-1]) > most_trouble)

    # -- telling -------------------------------------------------------------------------

    @property
    def tiles(self) -> list[Tile]:
        counts = self._count
        dead = counts(lambda info: info.holder_state == "dead", 1)
        silent = counts(lambda info: info.holder_state == "silent", 2)
        told = not (self._problems or self._untold or self.crowded)
        tells = [*self.pages] != self._untold
        waiting = sum(self._waited_for.values()), told
        deadlocks = len(self._deadlocks), told and self._is_surveyed
        held = sum(page.total for page in self.pages.values()), not self._problems
        return [
            self._tile(gettext("held"), held),
            self._tile(gettext("waited for"), waiting, {"waiting": "yes"}, is_known=tells),
            self._tile(
                ngettext("deadlock", "deadlocks", deadlocks[0]),
                deadlocks,
                {"waiting": "deadlock"},
                problem=("bad", gettext("holders wait for each other")),
                is_known=tells,
            ),
            self._tile(
                gettext("dead"),
                dead,
                {"holder_state": "dead"},
                problem=("bad", gettext("the process is gone")),
            ),
            self._tile(
                gettext("silent"),
                silent,
                {"holder_state": "silent"},
                problem=("warn", gettext("no sign of life for 15 s")),
            ),
        ]

    @property
    def notes(self) -> list[str]:
        """Why counts are not exact, or not known."""
        texts: list[tuple[Iterable[str], str]] = [
            (self._problems, gettext("Alias “%(alias)s” is not counted.")),
            (self._untold, gettext("Alias “%(alias)s” does not know who waits for its locks.")),
            (
                self.crowded,
                gettext(
                    "Alias “%(alias)s” has more than %(most)d locks, too many to look through: "
                    "the oldest come first."
                ),
            ),
        ]
        found = [
            text % {"alias": printable(alias), "most": MOST}
            for aliases, text in texts
            for alias in aliases
        ]
        if not self._is_surveyed and not self._problems and not self.crowded:
            found.append(gettext("Not all waiters were read, so a deadlock may be missing."))
        return found

    def _count(self, matches: Callable[[LeaseInfo], bool], most_trouble: int) -> tuple[int, bool]:
        """How many of the locks match, of which none is in less trouble than that; whether these
        are all."""
        number = sum(matches(info) for page in self.pages.values() for info in page.infos)
        return number, not self._problems and all(
            self._has_all(alias, most_trouble) for alias in self.pages
        )

    def _tile(
        self,
        name: str,
        count: tuple[int, bool],
        params: Mapping[str, str] | None = None,
        *,
        problem: tuple[str, str] | None = None,
        is_known: bool = True,
    ) -> Tile:
        number, is_exact = count
        if is_exact and is_known:
            text = str(number)
        elif number:
            text = gettext("at least %d") % number
        elif is_known and self.pages:
            text = gettext("none found")
        else:
            text = gettext("not known")
        if problem and number:
            style, hint = problem
        else:
            style, hint = "none" if is_exact and not number else "plain", ""
        return Tile(name, text, style, hint, params or {})
