"""Cells that name their column, for lists whose rows become cards where they are narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import display_for_value, label_for_field
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.text import capfirst

from .text_columns import PrintableColumns


class LabelledColumns(PrintableColumns):
    """The style sheet hides the names as long as the rows have a head."""

    unlabelled: tuple[str, ...] = ()
    """Columns that tell by themselves what they are."""

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        return self.labelled(super().get_list_display(request))

    def labelled(self, columns: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self._labelled(column) for column in self.shown(columns))

    def _labelled(self, column: Any) -> Any:
        name = column if isinstance(column, str) else column.__name__
        # A project's own column may be a field of the model, which Django shows in its own way.
        if name in self.unlabelled or (isinstance(column, str) and not hasattr(self, name)):
            return column
        # Django compares columns, so it has to get the same function each time.
        made: dict[Any, Any] = self.__dict__.setdefault("_labelled_columns", {})
        if column not in made:
            made[column] = self._made(name, column)
        return made[column]

    def _made(self, name: str, column: Any) -> Callable[[Any], str]:
        label, shows = label_for_field(column, self.model, self, return_attr=True)
        show: Any = getattr(self, name) if isinstance(column, str) else column

        @admin.display(description=label, ordering=getattr(shows, "admin_order_field", None))
        def labelled(obj: Any) -> str:
            empty = getattr(shows, "empty_value_display", self.get_empty_value_display())
            value = display_for_value(show(obj), empty, getattr(shows, "boolean", False))
            # The label is in an element of its own, so that the two stand side by side.
            return format_html(
                '<div class="dlock-cell{}"><span class="dlock-label">{}</span><div>{}</div></div>',
                # A card leaves it out.
                " dlock-no-value" if value == empty else "",
                capfirst(label),
                value,
            )

        # Django makes the name of the style from it.
        labelled.__name__ = name
        return labelled
