"""What the query string of a list may filter by: only what the list names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import get_fields_from_path
from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse


class NamedLookups(admin.ModelAdmin):  # type: ignore[type-arg] # no generic at run time
    """A list that can be filtered only by its own filters, and by what ``lookups`` names.

    Django lets a query string filter by every column of the model. So whoever may see the list
    could read a hidden column letter by letter: ``?message__startswith=a``, then ``b``.
    Everything that is not named is answered with 400.

    Attributes:
        lookups: What links to the list ask for, apart from its filters; each with its operator.
    """

    lookups: Sequence[str] = ()

    def get_lookups(self, request: HttpRequest) -> Iterator[str | None]:
        """Every look-up that this visitor's query string may contain."""
        yield from self.lookups
        if self.date_hierarchy:
            yield from (f"{self.date_hierarchy}__{part}" for part in ("year", "month", "day"))
        for each in self.get_list_filter(request):
            yield from self._parameters_of(each, request)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        # PostgreSQL refuses it in a query, and no value that is shown contains it.
        if any("\0" in text for _name, texts in request.GET.lists() for text in texts):
            raise BadRequest("A filter contains a null character")
        try:
            return super().changelist_view(request, extra_context)
        except OverflowError as error:
            # A time that has a year, but none in UTC.
            raise BadRequest(str(error)) from error

    def to_field_allowed(self, request: HttpRequest, to_field: str) -> bool:
        # Django fails on a relation from another model, which is no column.
        columns = {
            name for field in self.opts.concrete_fields for name in (field.name, field.attname)
        }
        return to_field in columns and super().to_field_allowed(request, to_field)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        return lookup in self.get_lookups(request)

    def _parameters_of(self, list_filter: Any, request: HttpRequest) -> Sequence[str | None]:
        """The parameters that one entry of ``list_filter`` takes."""
        if isinstance(list_filter, type) and issubclass(list_filter, admin.SimpleListFilter):
            # Without an instance, which would read its choices from the database.
            return [list_filter.parameter_name]
        made: admin.ListFilter
        if callable(list_filter):
            made = list_filter(request, {}, self.model, self)
        else:
            has_class = isinstance(list_filter, list | tuple)
            name, make = list_filter if has_class else (list_filter, admin.FieldListFilter.create)
            field = get_fields_from_path(self.model, name)[-1]
            made = make(field, request, {}, self.model, self, field_path=name)
        return made.expected_parameters()
