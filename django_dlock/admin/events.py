"""The list of lock events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import LockEvent
from ..operators.inspection import duration
from ..text.printable import printable
from .base import (
    badge,
    lines,
    long_text,
    may_see_users,
    time_of,
)
from .filters import StoredAliasFilter, tells_alias
from .labelled_columns import LabelledColumns
from .links import LinkedToLock, linked, lock_url, page_url

SEE_LOCKS = "django_dlock.view_heldlock"
SEE_RECORDS = "django_dlock.view_idempotencyrecord"

LONGEST = 1e12
"""Seconds; a longer duration was never written by us."""

_STYLES: dict[str, str] = {
    LockEvent.Event.LOST: "bad",
    LockEvent.Event.TAKEN_OVER: "warn",
    LockEvent.Event.BROKEN: "warn",
    LockEvent.Event.MAX_HOLD: "warn",
    LockEvent.Event.LONG_WAIT: "plain",
    LockEvent.Event.RERUN: "plain",
    LockEvent.Event.FORGOTTEN: "plain",
}


@admin.register(LockEvent)
class LockEventAdmin(LabelledColumns, LinkedToLock):
    """Losses, take-overs, breaks, ``max_hold``, long waits, and what operators did to records."""

    list_display = ("at", "what_and_why", "lock_name", "holder")
    unlabelled = ("at", "what_and_why")
    list_filter = ("event", ("alias", StoredAliasFilter), "when")
    search_fields = ("name", "reason", "owner")
    search_help_text = _("By name, reason or owner")
    # Of the links "Events of this lock", and of those in the lock statistics.
    lookups = ("name", "reason")

    fields = (
        *("at", "what", "alias", "lock", "records"),
        *("owner", "token", "reason", "user", "facts"),
    )
    readonly_fields = ("at", "what", "lock", "records", "facts")
    optional_fields = {
        "lock": "name",
        "owner": "owner",
        "token": "token",
        "reason": "reason",
        "user": "user",
        "facts": "detail",
    }
    lock_fields = ("alias", "name")

    at = time_of("when", _("when"))

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        users = ("user",) if may_see_users(request) else ()
        links = {"lock_name": "linked_name"} if request.user.has_perm(SEE_LOCKS) else {}
        columns = (links.get(each, each) for each in self.list_display)
        return self.labelled((*columns, *users))

    def get_fields(self, request: HttpRequest, obj: LockEvent | None = None) -> tuple[str, ...]:
        hidden = set() if may_see_users(request) else {"user"}
        if not (request.user.has_perm(SEE_RECORDS) and self._records_url):
            hidden |= {"records"}
        return tuple(field for field in super().get_fields(request, obj) if field not in hidden)

    def get_lookups(self, request: HttpRequest) -> Iterator[str | None]:
        yield from super().get_lookups(request)
        if may_see_users(request):
            yield "user"

    @admin.display(description=_("idempotency records"))
    def records(self, event: LockEvent) -> str:
        """A link to the records of the lock."""
        query = urlencode({"q": event.name})
        link = '<a href="{}?{}">{}</a>'
        return format_html(link, self._records_url, query, _("Records of this lock"))

    @property
    def _records_url(self) -> str:
        return page_url(self.admin_site.name, "idempotencyrecord", "changelist")

    @admin.display(description=_("detail"))
    def facts(self, event: LockEvent) -> str:
        try:
            return long_text(json.dumps(_rounded(event.detail), indent=2, ensure_ascii=False))
        except (ValueError, RecursionError):
            return gettext("They cannot be read.")

    @admin.display(description=_("event"), ordering="event")
    def what(self, event: LockEvent) -> str:
        # A newer version may know other events.
        return badge(_STYLES.get(event.event, "plain"), event.get_event_display())

    @admin.display(description=_("event"), ordering="event")
    def what_and_why(self, event: LockEvent) -> str:
        """The event; below it, its reason, and how long the lock was held or waited for."""
        notes = [self.why(event)] if event.reason else []
        took = self.duration(event)
        return lines(self.what(event), *notes, *([took] if took else []))

    @admin.display(description=_("name"), ordering="name")
    def lock_name(self, event: LockEvent) -> str:
        return _name(event, lines(event.name))

    @admin.display(description=_("name"), ordering="name")
    def linked_name(self, event: LockEvent) -> str:
        # A lock that nobody holds any more has this page, too.
        url = lock_url(self.admin_site.name, event.alias, event.name)
        return _name(event, linked(url, lines(event.name)))

    @admin.display(description=_("reason"), ordering="reason", empty_value="-")
    def why(self, event: LockEvent) -> str:
        return printable(event.reason.replace("_", " "))

    def duration(self, event: LockEvent) -> str | None:
        for fact, text in (("held_for", _("held %s")), ("waited", _("waited %s"))):
            seconds = _facts(event).get(fact)
            if isinstance(seconds, int | float) and abs(seconds) < LONGEST:
                return str(text) % duration(seconds)
        return None

    @admin.display(description=_("holder"))
    def holder(self, event: LockEvent) -> str | None:
        facts = _facts(event)
        texts = [f"{facts['host']} · {facts.get('pid')}"] if facts.get("host") else []
        texts += [str(facts[key]) for key in ("task_name", "path") if facts.get(key)]
        return lines(*texts) if texts else None


def _name(event: LockEvent, name: SafeString) -> SafeString:
    """The name of the lock; below it, its alias, if there are several."""
    if not tells_alias(event.alias):
        return name
    return format_html('{}<div class="dlock-alias">{}</div>', name, lines(event.alias))


def _facts(event: LockEvent) -> Mapping[str, Any]:
    """The detail of an event; empty if it is not one of ours."""
    return event.detail if isinstance(event.detail, Mapping) else {}


def _rounded(facts: Any) -> Any:
    """Seconds to the millisecond."""
    if not isinstance(facts, Mapping):
        return facts
    return {
        name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in facts.items()
    }
