"""The list of held locks: Django's own change list over what the backends answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast
from urllib.parse import quote, unquote

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..handler import locks
from ..lease import LeaseInfo
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


class _InfoFilter(SimpleListFilter):
    """A filter that is applied to leases, not to a queryset."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class AliasFilter(_InfoFilter):
    title = _("alias")
    parameter_name = "alias"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [(alias, alias) for alias in locks]


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


SORT_KEYS: dict[str, Callable[[LeaseInfo], Any]] = {
    "name": lambda info: info.name,
    "alias": lambda info: info.alias,
    "kind": lambda info: info.kind,
    "holder": lambda info: (info.process.host, info.process.pid) if info.process else ("", 0),
    "holder_state": lambda info: info.holder_state,
    # Not the age itself: each alias tells that as of another moment.
    "age": lambda info: -info.acquired_at.timestamp(),
    # A damaged entry would never end: the longest of all.
    "ttl": lambda info: float("inf") if info.ttl is None else info.ttl,
    "renewals": lambda info: info.renewals,
    "token": lambda info: info.token,
    "waiting": lambda info: info.waiting,
}


class HeldLockChangeList(ChangeList):
    """A page of leases.

    In order of age, which is how backends keep them, no more is read than the pages up to this
    one. Another order, and a filter that a backend does not know, read everything.
    """

    problems: dict[str, str]

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
            str(spec.parameter_name): spec.value()
            for spec in self.filter_specs
            if isinstance(spec, _InfoFilter) and spec.value() is not None
        }
        aliases = [alias for alias in locks if wanted.get("alias", alias) == alias]
        survey = Survey(aliases)
        order = self._order()
        if order[:1] and order[0][0] == "age" and not wanted.keys() - {"alias"}:
            self.result_count, infos = self._by_age(survey, newest_first=not order[0][1])
        else:
            infos = [
                info
                for found in survey.ask(lambda b: b.list(contains=self.query)).values()
                for info in found
                if all(str(getattr(info, fact)) == value for fact, value in wanted.items())
            ]
            self.result_count = len(infos)
        for name, descending in reversed(order):
            infos.sort(key=SORT_KEYS[name], reverse=descending)
        self._show_page(request, infos)
        self.problems = survey.problems

    def _order(self) -> list[tuple[str, bool]]:
        """Names of the facts to sort by, and whether each falls."""
        order = []
        for index, direction in self.get_ordering_field_columns().items():
            if 0 <= index < len(self.list_display):
                name = self.get_ordering_field(self.list_display[index])
                if name in SORT_KEYS:
                    order.append((str(name), direction == "desc"))
        return order

    def _by_age(self, survey: Survey, *, newest_first: bool) -> tuple[int, list[LeaseInfo]]:
        """How many there are, and the first of them, up to the end of this page."""
        counts = survey.ask(lambda b: b.count(contains=self.query))
        total = sum(counts.values())
        everything = self.show_all and total <= self.list_max_show_all
        last_page = -(-total // self.list_per_page)
        page = self.page_num if 1 <= self.page_num <= last_page else last_page
        limit = None if everything else page * self.list_per_page
        found = survey.ask(
            lambda b: b.list(contains=self.query, newest_first=newest_first, limit=limit)
        )
        return total, [info for infos in found.values() for info in infos]

    def _show_page(self, request: HttpRequest, infos: list[LeaseInfo]) -> None:
        """Set what the templates of the change list read.

        ``infos`` may be the beginning of what there is; ``result_count`` counts all.
        """
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
        # Locks come and go: a page that has vanished since it was linked is the last one now.
        page = self.paginator.get_page(self.page_num)
        self.page_num = page.number
        if self.multi_page and not (self.show_all and self.can_show_all):
            infos = infos[page.start_index() - 1 : page.end_index()]
        self.result_list = [as_row(info, request) for info in infos]
