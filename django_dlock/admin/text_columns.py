"""Columns of text, in lists and on pages, without characters that are not visible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import display_for_field
from django.core.exceptions import FieldDoesNotExist
from django.db import models
from django.http import HttpRequest

from ..text.printable import printable

_Column = str | Callable[[Any], Any]


class PrintableColumns(admin.options.BaseModelAdmin):  # type: ignore[type-arg] # as NamedLookups
    """Shows each column of text that a page names by its field.

    Django escapes HTML, but not marks of the writing direction and the like. A subclass whose
    ``get_list_display`` does not call that of this class calls ``shown`` itself.
    """

    def get_list_display(self, request: HttpRequest) -> Any:
        return self.shown(super().get_list_display(request))  # type: ignore[misc]

    def get_sortable_by(self, request: HttpRequest) -> Any:
        sortable = super().get_sortable_by(request)
        return self.shown(sortable)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.shown(super().get_readonly_fields(request, obj))

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        # Not in ``get_fields``, which subclasses search for the names of what they hide.
        return [
            (title, {**facts, "fields": self.shown(facts["fields"])})
            for title, facts in super().get_fieldsets(request, obj)
        ]

    def shown(self, columns: Iterable[Any]) -> tuple[_Column, ...]:
        """The columns, with a function in the place of each field of text."""
        return tuple(self._shown(each) if isinstance(each, str) else each for each in columns)

    def _shown(self, name: str) -> _Column:
        # Django compares columns, so it has to get the same function each time.
        made: dict[str, _Column] = self.__dict__.setdefault("_text_columns", {})
        if name not in made:
            try:
                field: Any = self.opts.get_field(name)
            except FieldDoesNotExist:
                return name
            is_text = isinstance(field, models.CharField | models.TextField)
            made[name] = self._text_column(field) if is_text and not field.choices else name
        return made[name]

    def _text_column(self, field: Any) -> _Column:
        @admin.display(description=field.verbose_name, ordering=field.name)
        def column(obj: Any) -> str:
            value = getattr(obj, field.name)
            return printable(str(display_for_field(value, field, self.get_empty_value_display())))

        # Django makes the name of the style from it.
        column.__name__ = field.name
        return column
