"""The page "Who blocks whom": all locks that others wait for."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.translation import gettext

from ..databases.time import local_time
from ..operators.blocking import NAMES, WAITERS_OF_EACH, survey
from ..operators.inspection import AliasQuery
from .base import GuardedAdmin
from .filters import known_aliases
from .people import People


class BlockingAdmin(GuardedAdmin):
    """The page "Who blocks whom"."""

    class Media:
        css = {"all": ("django_dlock/why.css",)}

    def get_urls(self) -> list[URLPattern]:
        view, name = self.admin_site.admin_view, f"django_dlock_{self.opts.model_name}"
        blocking = path("blocking/", view(self.blocking_view), name=f"{name}_blocking")
        return [blocking, *super().get_urls()]

    def blocking_view(self, request: HttpRequest) -> HttpResponseBase:
        """Which holder waits for which lock, over all aliases."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        aliases, settings_problem = known_aliases()
        query = AliasQuery(aliases)
        found = survey(query, names=NAMES, waiters=WAITERS_OF_EACH)
        people, blocking = People(request, self.admin_site.name), found.blocking
        return self.live_page(
            request,
            "blocking",
            title=gettext("Who blocks whom"),
            settings_problem=settings_problem,
            problems=query.problems,
            deadlocks=[people.deadlock(blocking, circle) for circle in blocking.deadlocks],
            rows=[people.line(line) for line in blocking.lines()],
            names_read=found.names_read,
            is_complete=found.is_complete,
            untold_aliases=found.untold,
            names_limit=NAMES,
            waiters_limit=WAITERS_OF_EACH,
        )

    def live_page(self, request: HttpRequest, template: str, **facts: Any) -> TemplateResponse:
        """A page that says when it was read, with a link to read it again."""
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "read_at": f"{local_time(timezone.now()):%H:%M:%S}",
            **facts,
        }
        return TemplateResponse(request, f"admin/django_dlock/heldlock/{template}.html", context)
