"""The list of held locks: Django's change list with rows from the backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import unquote

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest

from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..lease import SORT_KEYS, LeaseInfo, LeasePage, LeaseQuery, in_order
from ..models import HeldLock
from ..operators.inspection import AliasQuery
from ..text.names import check_name
from ..text.printable import printable
from .base import may_see_users
from .filters import LeaseFilter, TextFilter, known_aliases
from .links import id_of
from .overview import OLDEST_FIRST, TROUBLE_FIRST, Overview, Tile


def as_row(info: LeaseInfo, request: HttpRequest) -> HeldLock:
    """A lease as an object of the admin, without data that this visitor may not see."""
    if not may_see_users(request):
        metadata = {key: value for key, value in info.metadata.items() if key != "user"}
        info = dataclasses.replace(info, metadata=metadata)
    row = HeldLock(name=id_of(info.alias, info.name), alias=info.alias)
    row.info = info
    return row


def alias_and_name(object_id: str) -> tuple[str, str]:
    """Alias and name from an id that ``id_of`` has made."""
    alias, _slash, name = object_id.partition("/")
    return unquote(alias), name


def ids_of_name(name: str, aliases: Sequence[str]) -> list[tuple[str, str]]:
    """The ids that a lock of this name has in each alias; none if it cannot be a name."""
    try:
        check_name(name)
    except ValueError:
        return []
    return [(alias, id_of(alias, name)) for alias in aliases]


class HeldLockChangeList(ChangeList):
    """A page of leases, which the backends have filtered and sorted.

    Unless a column is chosen, those in a deadlock come first, and then those in other trouble. If
    only one alias has leases, it returns just the rows of the page. If several have some, each
    returns all rows up to the end of the page, and they are merged.

    Attributes:
        problems: Alias → why it did not answer.
        notices: What operators should know now, such as a switch to another store.
        settings_problem: Why there are no aliases at all; else empty.
        tiles: The counts over all aliases, whatever the list shows.
        tile_notes: Why some counts are not exact.
        not_held: Alias and id of the lock whose whole name was searched for, if nothing was found.
    """

    problems: dict[str, str]
    notices: list[str]
    settings_problem: str
    tiles: list[Tile]
    tile_notes: list[str]
    not_held: list[tuple[str, str]]

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> QuerySet[HeldLock]:
        self.filter_specs, self.has_filters, unknown, _duplicates, self.has_active_filters = (
            self.get_filters(request)
        )
        if unknown:
            raise IncorrectLookupParameters
        # Django counts a field that was submitted empty, too.
        self.has_active_filters = any(spec.used_parameters for spec in self.filter_specs)
        self.clear_all_filters_qs = self.get_query_string(remove=list(self.get_filters_params()))
        return self.root_queryset

    def get_results(self, request: HttpRequest) -> None:
        wanted: dict[str, Any] = {}
        for spec in self.filter_specs:
            if isinstance(spec, LeaseFilter):
                wanted.update(spec.wanted())
        only = wanted.pop("alias", None)
        in_deadlock = wanted.pop("deadlock", False)
        aliases, self.settings_problem = known_aliases()
        self._has_aliases = len(aliases) > 1
        everything = AliasQuery(aliases)
        self._overview = Overview(everything, self.list_per_page)
        alias_query = AliasQuery(alias for alias in aliases if only in (None, alias))
        # An alias that has failed is not asked again.
        alias_query.problems = everything.problems
        order = self._order()
        default = OLDEST_FIRST if self._overview.crowded else TROUBLE_FIRST
        query = LeaseQuery(contains=self.query, sort=order or default, **wanted)
        deadlocked = [
            info
            for info in self._overview.deadlocked.values()
            if info.alias in alias_query.aliases and query.matches(info)
        ]
        deadlocked = in_order(deadlocked, query.sort)
        self._first = [] if order else deadlocked
        infos = self._cut(deadlocked) if in_deadlock else self._read(alias_query, query)
        self.problems = {
            alias: problem
            for alias, problem in everything.problems.items()
            if alias in alias_query.aliases
        }
        self.notices = [text for alias in aliases for text in _notices_of(alias)]
        self.tiles = self._overview.tiles if aliases else []
        self.tile_notes = self._overview.notes
        self._show_page(request, infos)
        self.not_held = (
            [] if infos or self.problems else ids_of_name(self.query, alias_query.aliases)
        )

    @property
    def other_params(self) -> dict[str, str]:
        """What the form of ``TextFilter`` has to keep of the page's address."""
        own = {PAGE_VAR, *(name for name, _label in TextFilter.FIELDS)}
        return {name: value for name, value in self.params.items() if name not in own}

    def _order(self) -> tuple[str, ...]:
        """The sort keys in the form of ``LeaseQuery.sort``."""
        order = []
        for index, direction in self.get_ordering_field_columns().items():
            if 0 <= index < len(self.list_display):
                name = self.get_ordering_field(self.list_display[index])
                if name in SORT_KEYS:
                    order.append(f"-{name}" if direction == "desc" else str(name))
        return tuple(order)

    @property
    def chosen(self) -> dict[str, str]:
        """The filters of the list, as a tile has them; with them, which tile it shows."""
        found = {"q": self.query} if self.query else {}
        for spec in self.filter_specs:
            found |= {name: str(value) for name, value in spec.used_parameters.items()}
        return found

    def _cut(self, infos: list[LeaseInfo]) -> list[LeaseInfo]:
        """The leases of this page, out of all; sets ``page_num`` and ``result_count``."""
        self.result_count = len(infos)
        if self.show_all and self.result_count <= self.list_max_show_all:
            return infos
        last_page = max(1, -(-self.result_count // self.list_per_page))
        self.page_num = min(max(1, self.page_num), last_page)
        end = self.page_num * self.list_per_page
        return infos[end - self.list_per_page : end]

    def _read(self, alias_query: AliasQuery, query: LeaseQuery) -> list[LeaseInfo]:
        """The leases of this page; sets ``page_num`` and ``result_count``."""
        if self.show_all:
            everything = self._ask(alias_query, query, 0, self.list_max_show_all)
            if self.result_count <= self.list_max_show_all:
                return everything
        self.page_num = max(1, self.page_num)
        while True:
            infos = self._ask(alias_query, query, (self.page_num - 1) * self.list_per_page)
            # Locks come and go: if the requested page no longer exists, show the last one.
            last_page = max(1, -(-self.result_count // self.list_per_page))
            if self.page_num <= last_page:
                return infos
            self.page_num = last_page

    def _ask(
        self, alias_query: AliasQuery, query: LeaseQuery, start: int, size: int | None = None
    ) -> list[LeaseInfo]:
        """``size`` leases from index ``start`` on, in the chosen order; sets ``result_count``."""
        size = size or self.list_per_page
        end, first = start + size, {(info.alias, info.name) for info in self._first}
        pages = self._pages(alias_query, query, start, end)
        merged = bool(first) or sum(page.total > 0 for page in pages.values()) > 1
        if merged and start:
            pages = self._pages(alias_query, query, 0, end)
        self.result_count = sum(page.total for page in pages.values())
        # Those of one alias are sorted already, but damage of the metadata was not seen.
        infos = in_order((info for page in pages.values() for info in page.infos), query.sort)
        others = [info for info in infos if (info.alias, info.name) not in first]
        return [*self._first, *others][start:end] if merged else infos

    def _pages(
        self, alias_query: AliasQuery, query: LeaseQuery, start: int, end: int
    ) -> dict[str, LeasePage]:
        """The leases of each alias from index ``start`` on; those that were read are not asked."""
        read = self._overview
        if query == LeaseQuery(sort=TROUBLE_FIRST) and end <= read.size:
            return {
                alias: LeasePage(page.infos[start:end], page.total)
                for alias, page in read.pages.items()
                if alias in alias_query.aliases
            }
        return alias_query.ask(lambda b: b.page(query, offset=start, limit=end - start))

    def _show_page(self, request: HttpRequest, infos: list[LeaseInfo]) -> None:
        """Set the attributes that the templates of the change list read."""
        self.show_full_result_count = False
        # No link "show all" if nothing is filtered out, and no "0 results" if an alias did not
        # answer.
        narrowed = (self.query or self.has_active_filters) and not self.problems
        self.full_result_count = None if narrowed else self.result_count
        self.show_admin_actions = True
        self.can_show_all = self.result_count <= self.list_max_show_all
        self.multi_page = self.result_count > self.list_per_page
        # The paginator only counts; the rows of other pages have not been read.
        counted = cast(QuerySet[Any], range(self.result_count))
        self.paginator = self.model_admin.get_paginator(request, counted, self.list_per_page)
        self.result_list = [as_row(info, request) for info in infos]
        for row, info in zip(self.result_list, infos, strict=True):
            row.shows_alias = self._has_aliases
            row.in_deadlock = (info.alias, info.name) in self._overview.deadlocked


def _notices_of(alias: str) -> Sequence[str]:
    try:
        return [printable(text) for text in locks[alias].notices()]
    except InvalidLockBackend:
        # One of the problems.
        return ()
