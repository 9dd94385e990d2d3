"""The choice of the database whose records or follow-ups a page shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin, messages
from django.db import Error, connections, router
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import IdempotencyRecord
from ..operators.audit import is_defined


def databases() -> list[str]:
    """The databases that may have a table of records, first the one that routers choose.

    A task may use any of them with ``idempotency_using``.
    """
    usual = router.db_for_read(IdempotencyRecord)
    others = (alias for alias in connections if alias != usual)
    return [
        usual,
        *(
            alias
            for alias in others
            if is_defined(alias)
            and router.allow_migrate(alias, "django_dlock", model_name="idempotencyrecord")
        ),
    ]


def database_of(request: HttpRequest) -> str:
    """The database whose records a page shows.

    On pages below the list, it is among the list's filters, which the admin passes on.
    """
    filters = QueryDict(request.GET.get("_changelist_filters", ""))
    wanted = request.GET.get(DatabaseFilter.parameter_name) or filters.get(
        DatabaseFilter.parameter_name
    )
    found = databases()
    return str(wanted) if wanted in found else found[0]


class DatabaseFilter(admin.SimpleListFilter):
    """The choice of a database; ``InChosenDatabase.get_queryset`` applies it."""

    title = _("database")
    parameter_name = "database"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(alias, alias) for alias in databases()]

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset

    def choices(self, changelist: Any) -> Iterator[Any]:
        for index, (alias, _title) in enumerate(self.lookup_choices):
            yield {
                "selected": self.value() == alias or (self.value() is None and index == 0),
                "query_string": changelist.get_query_string({self.parameter_name: alias}),
                "display": alias,
            }


class InChosenDatabase(admin.ModelAdmin):  # type: ignore[type-arg] # no generic at run time
    """Rows of the chosen database; if it cannot be read, the list of the usual one says so."""

    def database(self, request: HttpRequest) -> str:
        return database_of(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(database_of(request))

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().changelist_view(request, extra_context)
        except Error as error:
            database = database_of(request)
            if database == databases()[0]:
                raise
            text = gettext("The records of database “%(database)s” cannot be read: %(error)s")
            facts = {"database": database, "error": error}
            self.message_user(request, text % facts, messages.ERROR)
            return HttpResponseRedirect(request.path)
