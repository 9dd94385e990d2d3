"""The page of lock statistics: what happened to locks, in pictures and in tables."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import Error, router
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext

from ..databases.errors import fate_of, migrate_command
from ..metrics import config, recorder
from ..metrics.groups import OTHER
from ..models import LockStatistics
from .base import ReadOnlyAdmin
from .cards import cards, clock_time
from .counted_links import CountedLinks
from .figures import RANGES, Figures
from .filters import known_aliases
from .totals import totals


@admin.register(LockStatistics)
class LockStatisticsAdmin(ReadOnlyAdmin):
    """What was counted; see ``metrics.admin``."""

    change_list_template = "admin/django_dlock/lockstatistics/change_list.html"

    class Media:
        css = {"all": ("django_dlock/statistics.css",)}

    def get_urls(self) -> list[URLPattern]:
        # A row by itself tells nothing.
        view = self.admin_site.admin_view(self.changelist_view)
        return [path("", view, name="django_dlock_lockstatistics_changelist")]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        chosen = RANGES.get(request.GET.get("range", ""), RANGES["hour"])
        aliases, _problem = known_aliases()
        alias = request.GET.get("alias", "")
        alias = alias if alias in aliases else ""
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": gettext("Lock statistics"),
            "media": self.media,
            "ranges": [(each.key, each.title) for each in RANGES.values()],
            "range": chosen.key,
            "aliases": aliases if len(aliases) > 1 else [],
            "alias": alias,
            **setup(),
            **(extra_context or {}),
        }
        try:
            figures = Figures(chosen, alias)
        except Error as error:
            if fate_of(error) == "missing":
                database = router.db_for_read(LockStatistics)
                context["migrate"] = f"python {migrate_command(database)}"
            context["problem"] = error
        else:
            context["is_empty"] = figures.is_empty
            context["until"] = clock_time(figures.now)
            if not figures.is_empty:
                links = CountedLinks(request, self.admin_site, figures)
                context |= {"totals": totals(figures, links), "cards": cards(figures, links)}
                context["has_other"] = any(group.name == OTHER for group in figures.groups())
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.change_list_template, context)


def setup() -> dict[str, Any]:
    """What to change in the settings so that this process counts for the page."""
    try:
        chosen = config.read()
        # Metrics are off as well if the library of another exporter is missing.
        recorder.modules(chosen)
    except ImproperlyConfigured as error:
        return {"settings_problem": error}
    return {} if "admin" in chosen.exporters else {"setting": _setting()}


def _setting() -> str:
    """The line to paste at the end of the settings, below what they have of it."""
    if not getattr(settings, "DLOCK_METRICS", None):
        return 'DLOCK_METRICS = {"EXPORTERS": ["admin"]}'
    return (
        "DLOCK_METRICS = {\n"
        "    **DLOCK_METRICS,\n"
        '    "EXPORTERS": [*DLOCK_METRICS.get("EXPORTERS", ()), "admin"],\n'
        "}"
    )
