"""The list of held locks: Django's own change list over what the backends answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast
from urllib.parse import quote, unquote

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..lease import SORT_KEYS, LeaseInfo, LeaseQuery, in_order
from ..models import HeldLock
from ..operations import Survey
from .base import may_see_users

__all__ = [
    "AliasFilter",
    "HeldLockChangeList",
    "HolderStateFilter",
    "KindFilter",
    "as_row",
    "place_of",
]

KINDS = (
    ("held", _("held")),
    ("cooling", _("cooling")),
    ("parked", _("parked")),
    ("reserved", _("reserved")),
)
HOLDER_STATES = (
    ("alive", _("alive")),
    ("silent", _("silent")),
    ("dead", _("dead")),
    ("unknown", _("unknown")),
)


def as_row(info: LeaseInfo, request: HttpRequest) -> HeldLock:
    """A lease as an object of the admin, without what this visitor may not see."""
    if not may_see_users(request):
        metadata = {key: value for key, value in info.metadata.items() if key != "user"}
        info = dataclasses.replace(info, metadata=metadata)
    # The same name may be held at two aliases: the object's id names both. An alias is quoted
    # once more, so that the first slash always ends it.
    row = HeldLock(name=f"{quote(info.alias, safe='')}/{info.name}", alias=info.alias)
    row.info = info
    return row


def place_of(object_id: str) -> tuple[str, str]:
    """Alias and name out of the id of ``as_row``."""
    alias, _slash, name = object_id.partition("/")
    return unquote(alias), name


def known_aliases() -> tuple[list[str], str]:
    """The aliases of ``DLOCKS``, and why there are none where it is no dict."""
    try:
        return list(locks), ""
    except InvalidLockBackend as error:
        return [], str(error)


class _InfoFilter(SimpleListFilter):
    """A filter that is applied to leases, not to a queryset."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class AliasFilter(_InfoFilter):
    title = _("alias")
    parameter_name = "alias"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [(alias, alias) for alias in known_aliases()[0]]


class KindFilter(_InfoFilter):
    title = _("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        return KINDS


class HolderStateFilter(_InfoFilter):
    title = _("state of the holder")
    parameter_name = "holder_state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        return HOLDER_STATES


class HeldLockChangeList(ChangeList):
    """A page of leases, found and put in order by the backends.

    One alias alone gives the rows of the page. Where several have some, each gives its first
    ones, up to the end of the page, to be merged.

    Attributes:
        problems: Alias → why it gave no answer.
        settings_problem: Why there are no aliases at all; empty where there are.
    """

    problems: dict[str, str]
    settings_problem: str

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> QuerySet[HeldLock]:
        self.filter_specs, self.has_filters, unknown, _duplicates, self.has_active_filters = (
            self.get_filters(request)
        )
        if unknown:
            raise IncorrectLookupParameters
        self.clear_all_filters_qs = self.get_query_string(remove=list(self.get_filters_params()))
        return self.root_queryset

    def get_ordering_field_columns(self) -> dict[int, Literal["desc", "asc"]]:
        if ORDER_VAR in self.params:
            return super().get_ordering_field_columns()
        return {list(self.list_display).index("age"): "desc"}

    def get_results(self, request: HttpRequest) -> None:
        wanted = {
            str(spec.parameter_name): str(spec.value())
            for spec in self.filter_specs
            if isinstance(spec, _InfoFilter) and spec.value() is not None
        }
        only = wanted.pop("alias", None)
        aliases, self.settings_problem = known_aliases()
        survey = Survey(alias for alias in aliases if only in (None, alias))
        query = LeaseQuery(contains=self.query, sort=self._order(), **wanted)
        self._show_page(request, self._read(survey, query))
        self.problems = survey.problems

    def _order(self) -> tuple[str, ...]:
        """The facts to sort by, as ``LeaseQuery`` has it."""
        order = []
        for index, direction in self.get_ordering_field_columns().items():
            if 0 <= index < len(self.list_display):
                name = self.get_ordering_field(self.list_display[index])
                if name in SORT_KEYS:
                    order.append(f"-{name}" if direction == "desc" else str(name))
        return tuple(order)

    def _read(self, survey: Survey, query: LeaseQuery) -> list[LeaseInfo]:
        """The leases of this page; sets ``page_num`` and ``result_count``."""
        if self.show_all:
            everything = self._ask(survey, query, 0, self.list_max_show_all)
            if self.result_count <= self.list_max_show_all:
                return everything
        self.page_num = max(1, self.page_num)
        while True:
            infos = self._ask(survey, query, (self.page_num - 1) * self.list_per_page)
            # Locks come and go: a page that has vanished since it was linked is the last one now.
            last_page = max(1, -(-self.result_count // self.list_per_page))
            if self.page_num <= last_page:
                return infos
            self.page_num = last_page

    def _ask(
        self, survey: Survey, query: LeaseQuery, start: int, size: int | None = None
    ) -> list[LeaseInfo]:
        """So many leases from a place in the order of all; sets ``result_count``."""
        size = size or self.list_per_page
        pages = survey.ask(lambda b: b.page(query, offset=start, limit=size))
        several = sum(page.total > 0 for page in pages.values()) > 1
        if several and start:
            pages = survey.ask(lambda b: b.page(query, limit=start + size))
        self.result_count = sum(page.total for page in pages.values())
        infos = [info for page in pages.values() for info in page.infos]
        # One alias has them in order; the order of its grants is no fact of theirs.
        return in_order(infos, query.sort)[start : start + size] if several else infos

    def _show_page(self, request: HttpRequest, infos: list[LeaseInfo]) -> None:
        """Set what the templates of the change list read."""
        self.show_full_result_count = False
        # Where nothing is left out, there is no "show all" to offer.
        narrowed = self.query or self.has_active_filters
        self.full_result_count = None if narrowed else self.result_count
        self.show_admin_actions = False
        self.can_show_all = self.result_count <= self.list_max_show_all
        self.multi_page = self.result_count > self.list_per_page
        # The paginator only counts; what it would slice is not all here.
        counted = cast(QuerySet[Any], range(self.result_count))
        self.paginator = self.model_admin.get_paginator(request, counted, self.list_per_page)
        self.result_list = [as_row(info, request) for info in infos]
