"""Pages, searches and counts of the present leases, for operators; uses the index of names.

A page in the order of the grants reads only the rows that it shows. Any other order or filter
reads the whole index, but only the facts that it needs of each lease, and then the rows of the
page. One script reads at most ``NAMES_PER_CALL`` names, so that the server can serve other
clients in between.

Names, leases and processes are read by one request each, because the keys of the next one are
known only from the answer of the last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, cast

from ...lease import SORT_KEYS, LeaseInfo, LeasePage, LeaseQuery
from .commands import EXACTLY, Ask, as_it_is, text
from .keys import Keys
from .processes import read_processes
from .rows import ALL_FACTS, FACTS, Reader, Row
from .scripts import CLEAN_INDEX, LIST_LEASES, LIST_NAMES

NAMES_PER_CALL = 1000
ROWS_PER_CALL = 500

_EVERYTHING = LeaseQuery()


class RedisListing:
    """The methods are those of ``BaseLockBackend``."""

    def __init__(self, alias: str, keys: Keys, ask: Ask) -> None:
        self.alias, self._keys, self._ask = alias, keys, ask

    def get(self, name: str) -> LeaseInfo | None:
        rows = self._rows([name], Reader(self.alias), name=name)
        return rows[0].info() if rows else None

    def get_many(self, names: Sequence[str]) -> dict[str, LeaseInfo]:
        reader, found = Reader(self.alias), dict[str, LeaseInfo]()
        for start in range(0, len(names), ROWS_PER_CALL):
            rows = self._rows(names[start : start + ROWS_PER_CALL], reader)
            found |= {row.exact_name: row.info() for row in rows}
        return found

    def page(self, query: LeaseQuery, *, offset: int, limit: int | None) -> LeasePage:
        # All names here have the same alias.
        sort = [key for key in query.sort if key.removeprefix("-") != "alias"]
        newest_first = sort[:1] in (["age"], ["-token"])
        if newest_first or sort[:1] in (["-age"], ["token"]):
            sort = []
        if sort or replace(query, sort=()) != LeaseQuery():
            return self._selected(query, sort, newest_first, offset, limit)
        return self._by_rank(newest_first, offset, limit)

    # -- the ways to a page ------------------------------------------------------------

    def _by_rank(self, newest_first: bool, offset: int, limit: int | None) -> LeasePage:
        """In the order of the index, where the server finds a rank without counting."""
        reader, cursor, is_first = Reader(self.alias), "", True
        # A name that is released and acquired again between two calls is found twice.
        infos: dict[str, LeaseInfo] = {}
        while True:
            wanted = ROWS_PER_CALL if limit is None else limit - len(infos)
            size = min(wanted, ROWS_PER_CALL)
            names, after, total = self._names(cursor, newest_first, rank=offset, size=size)
            is_all = is_first and len(names) == total
            # A small index is cleaned first, so that ranks and counts are exact.
            if is_first and not is_all and total <= NAMES_PER_CALL and self._clean():
                names, after, total = self._names(cursor, newest_first, rank=offset, size=size)
            cursor, is_first = after, False
            for row in self._rows(names, reader):
                infos.pop(row.exact_name, None)
                infos[row.exact_name] = row.info()
            if not cursor or len(infos) == limit:
                return LeasePage(list(infos.values()), len(infos) if is_all else total)

    def _selected(
        self,
        query: LeaseQuery,
        sort: Sequence[str],
        newest_first: bool,
        offset: int,
        limit: int | None,
    ) -> LeasePage:
        """Read all names, and keep only those up to the end of the page."""
        reader = Reader(self.alias)
        # Names and metadata are filtered before this.
        rest = replace(query, prefix="", contains="", task="", sort=())
        is_wanted = None if rest == LeaseQuery() else rest.matches
        selection = _Selection(sort, math.inf if limit is None else offset + limit)
        facts = _facts_for(query, sort)

        cursor, more = "", True
        while more:
            names, cursor, _ = self._names(cursor, newest_first, size=NAMES_PER_CALL)
            more = bool(cursor)
            names = [name for name in names if name.startswith(query.prefix)]
            rows = self._rows(names, reader, facts, query)
            if is_wanted:
                rows = [row for row in rows if is_wanted(cast(LeaseInfo, row))]
            selection.add(rows)
        names = selection.names()[offset:]
        infos: list[LeaseInfo] = []
        for start in range(0, len(names), ROWS_PER_CALL):
            chunk = self._rows(names[start : start + ROWS_PER_CALL], reader)
            infos += [row.info() for row in chunk]
        return LeasePage(infos, selection.total)

    # -- scripts -----------------------------------------------------------------------

    def _names(
        self, cursor: str, newest_first: bool, *, size: int, rank: int = 0
    ) -> tuple[list[str], str, int]:
        """Names from the index; the cursor for the next ones, if there may be any; how many all
        are."""
        args = [cursor, rank, size, "1" if newest_first else "0"]
        cursor_, total, *names = self._ask(LIST_NAMES, [self._keys.index], args, as_it_is)
        return [name.decode(*EXACTLY) for name in names], text(cursor_), total

    def _clean(self) -> bool:
        """Remove free names from a small index; returns whether there were any."""
        names, _, _ = self._names("", False, size=NAMES_PER_CALL)
        keys = self._keys
        locks = [keys.locks + name for name in names]
        return bool(self._ask(CLEAN_INDEX, [keys.index, *locks], [keys.base], as_it_is))

    def _rows(
        self,
        names: Sequence[str],
        reader: Reader,
        facts: Sequence[str] = ALL_FACTS,
        query: LeaseQuery = _EVERYTHING,
        name: str = "",
    ) -> list[Row]:
        """Rows of those names that are held, and have in their metadata what the query says."""
        if not names:
            return []
        keys, sought = self._keys, (query.contains, query.task)
        words = [keys.index, *[keys.locks + each for each in names]]
        if "@waiting" in facts:
            words += [keys.waiters + each for each in names]
        args = [keys.base, *(part for text in sought for part in (text, _quoted(text))), *facts]
        answer = self._ask(LIST_LEASES, words, args, as_it_is, name)
        rows, processes = reader.rows(facts, *answer)
        if processes:
            reader.learn(read_processes(self._ask, keys, processes))
        return rows


def _facts_for(query: LeaseQuery, sort: Sequence[str]) -> list[str]:
    keys = [key.removeprefix("-") for key in sort]
    keys += ["holder_state"] if query.holder_state else []
    keys += ["holder"] if query.host else []
    keys += ["age"] if query.older_than else []
    keys += ["waiting"] if query.waiting else []
    # In reverse, so that computed facts, which begin with ``@``, come last.
    return sorted({fact for key in keys for fact in FACTS[key]}, reverse=True)


def _quoted(text: str) -> str:
    return json.dumps(text)[1:-1]


class _Selection:
    """Keeps the first ``size`` leases in an order out of all that are added, and not many more.

    Attributes:
        total: How many were added.
    """

    def __init__(self, sort: Sequence[str], size: float) -> None:
        self.total = 0
        self._size, self._best = size, list[tuple[Any, ...]]()
        self._keys = [SORT_KEYS[key.removeprefix("-")] for key in sort]
        self._falling = [key.startswith("-") for key in sort]

    def add(self, rows: Sequence[Row]) -> None:
        self.total += len(rows)
        # One entry for each lease: its sort keys, and its name last.
        columns = [list(map(key, cast("Sequence[LeaseInfo]", rows))) for key in self._keys]
        self._best += zip(*columns, [row.exact_name for row in rows], strict=True)
        if len(self._best) > 2 * self._size + NAMES_PER_CALL:
            self._settle()

    def names(self) -> list[str]:
        self._settle()
        # A name that was released and acquired again in between was found twice.
        return list(dict.fromkeys(best[-1] for best in self._best))

    def _settle(self) -> None:
        for column, falling in reversed(list(enumerate(self._falling))):
            self._best.sort(key=itemgetter(column), reverse=falling)
        if self._size < len(self._best):
            del self._best[int(self._size) :]
