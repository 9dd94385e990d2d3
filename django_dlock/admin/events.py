"""The list of lock events."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..models import LockEvent
from ..operations import duration
from .base import ReadOnlyAdmin, badge, may_see_users

__all__ = ["LockEventAdmin"]

_LOOKS = {
    LockEvent.Event.LOST: "bad",
    LockEvent.Event.TAKEN_OVER: "warn",
    LockEvent.Event.BROKEN: "warn",
    LockEvent.Event.MAX_HOLD: "warn",
    LockEvent.Event.LONG_WAIT: "plain",
}


@admin.register(LockEvent)
class LockEventAdmin(ReadOnlyAdmin[LockEvent]):
    """What happened to locks: losses, take-overs, breaks, longest holds, long waits."""

    list_display = ("when", "what", "name", "why", "duration", "holder", "alias", "token")
    list_filter = ("event", "alias", "when")
    search_fields = ("name", "reason", "owner")
    search_help_text = _("By name, reason or owner")

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        users = ("user",) if may_see_users(request) else ()
        return (*self.list_display, *users)

    def get_exclude(self, request: HttpRequest, obj: LockEvent | None = None) -> tuple[str, ...]:
        return () if may_see_users(request) else ("user",)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        # Django filters by any field that a query string names, shown or not.
        hidden = lookup.partition("__")[0] == "user" and not may_see_users(request)
        return not hidden and super().lookup_allowed(lookup, value, request)

    @admin.display(description=_("event"), ordering="event")
    def what(self, event: LockEvent) -> str:
        look = _LOOKS.get(LockEvent.Event(event.event), "plain")
        return badge(look, event.get_event_display())

    @admin.display(description=_("reason"), ordering="reason", empty_value="-")
    def why(self, event: LockEvent) -> str:
        return event.reason.replace("_", " ")

    @admin.display(description=_("duration"))
    def duration(self, event: LockEvent) -> str | None:
        for fact, text in (("held_for", _("held %s")), ("waited", _("waited %s"))):
            seconds = event.detail.get(fact)
            if isinstance(seconds, int | float):
                return str(text) % duration(seconds)
        return None

    @admin.display(description=_("holder"))
    def holder(self, event: LockEvent) -> str | None:
        facts = (event.detail.get(key) for key in ("task_name", "path", "host"))
        return next((str(fact) for fact in facts if fact), None)
