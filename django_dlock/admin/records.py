"""The page of idempotency records."""

from __future__ import annotations

import json
import re
from typing import Any

from django.contrib import admin
from django.db.models import Max, Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..models import FollowUp, IdempotencyRecord
from ..operators.inspection import duration
from ..text.printable import printable
from .base import (
    BoundedChangeList,
    BoundedPaginator,
    badge,
    breakable,
    lines,
    long_text,
    remember,
    request_of,
    time_of,
)
from .databases import DatabaseFilter, InChosenDatabase, database_of
from .filters import tells_alias
from .follow_ups import FollowUps
from .history import history_of
from .labelled_columns import LabelledColumns
from .links import events_url, lock_link
from .record_steps import RecordSteps
from .runs import RunFilter, note_states, outlook, outlook_after_rerun, shown_state

_HELD = {
    "dead": ("bad", _("held by a dead process")),
    "silent": ("warn", _("held, without a sign of life")),
}
"""How the lock of a run is shown whose process is not well."""

_HISTORY = "_dlock_history"
MOST_SCOPES = 50

SEE_RESULTS = "view_results"
"""The permission to see results, stored answers and the texts of errors; named like a step."""

# Errors are stored as ``ValueError('…')`` by tasks and as ``ValueError: …`` by views. Anything else
# is the text of an error with a representation of its own, except for what we have written.
_KIND = re.compile(r"[A-Za-z_][\w.]*(?=\(|: )|HTTP \d{3}$|cancelled before the view began$")


def first_scopes(database: str) -> list[str]:
    """The first scopes, each found by one lookup in the index; Django's filter reads all rows."""
    records = IdempotencyRecord.objects.using(database).order_by("scope")
    found: list[str] = []
    after = records
    while len(found) < MOST_SCOPES:
        following = list(after.values_list("scope", flat=True)[:1])
        if not following:
            break
        found += following
        after = records.filter(scope__gt=found[-1])
    return found


class ScopeFilter(admin.SimpleListFilter):
    title = _("scope")
    parameter_name = "scope"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(scope, printable(scope)) for scope in first_scopes(database_of(request))]

    def has_output(self) -> bool:
        return True

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(scope=self.value())


class RecordChangeList(BoundedChangeList):
    """The list of records, without long columns that it does not show."""

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        return super().get_queryset(request, *args, **kwargs).defer("message", "result", "error")

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.result_list = list(self.result_list)
        # Here for the whole page, because a column sees one record at a time.
        note_states(self.result_list)


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(LabelledColumns, InChosenDatabase, RecordSteps):
    """The state of each business key."""

    list_display = ("key", "state_badge", "scope_wrapped", "runs", "started_and_took")
    unlabelled = ("key", "state_badge")
    list_filter = (DatabaseFilter, "state", RunFilter, ScopeFilter, "created_at", "expires_at")
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    search_fields = ("key", "scope", "=task_id", "lock_name")
    search_help_text = _(
        "All records by the whole key or scope; the latest %(count)d also by a part of the key, "
        "scope or lock, or by the task id"
    ) % {"count": BoundedPaginator.MAX_ROWS}
    ordering = ("-id",)
    change_list_template = "admin/django_dlock/idempotencyrecord/change_list.html"
    change_form_template = "admin/django_dlock/idempotencyrecord/change_form.html"
    inlines = (FollowUps,)
    fields = (
        "scope",
        "key",
        "state_badge",
        "next_delivery",
        "attempt",
        "deaths",
        "worker",
        "task_id",
        "started",
        "finished",
        "lock",
        "arguments",
        "result_text",
        "error_text",
        "error_kind",
        "history",
        "owner",
        "token",
        "step",
        "ending",
        "payload",
        "created",
        "expires",
    )
    readonly_fields = fields
    optional_fields = {
        "worker": "worker",
        "task_id": "task_id",
        "finished": "finished_at",
        "lock": "lock_name",
        "payload": "payload",
        "result_text": "result",
        "error_text": "error",
        "error_kind": "error",
        "owner": "owner",
        "token": "token",
        "step": "step",
        "ending": "ending",
    }

    created = time_of("created_at", _("created at"))
    started = time_of("started_at", _("started at"))
    finished = time_of("finished_at", _("finished at"))
    expires = time_of("expires_at", _("expires at"))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search all records by indexed columns, and the latest ones by all search fields."""
        if not search_term:
            return queryset, False
        chosen = request.GET.get(ScopeFilter.parameter_name)
        scopes = first_scopes(queryset.db) if chosen is None else [chosen]
        digests = [IdempotencyRecord.digest_of(scope, search_term) for scope in scopes]
        exactly = queryset.filter(Q(digest__in=digests) | Q(scope=search_term))
        newest = IdempotencyRecord.objects.using(queryset.db).aggregate(pk=Max("pk"))["pk"] or 0
        latest = queryset.filter(pk__gt=newest - self.paginator.MAX_ROWS)
        return exactly | super().get_search_results(request, latest, search_term)[0], False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[RecordChangeList]:
        return RecordChangeList

    @admin.display(description=_("state"), ordering="state")
    def state_badge(self, record: IdempotencyRecord) -> str:
        return shown_state(record)

    @admin.display(description=_("next delivery"))
    def next_delivery(self, record: IdempotencyRecord) -> str:
        """When the broker delivers the message of an interrupted run again."""
        return outlook(record)

    @admin.display(description=_("scope"), ordering="scope")
    def scope_wrapped(self, record: IdempotencyRecord) -> str:
        return lines(record.scope)

    @admin.display(description=_("runs"), ordering="attempt")
    def runs(self, record: IdempotencyRecord) -> str | None:
        """How many there were, unless it is the first one and nothing has happened to it."""
        attempts, deaths = record.attempt, record.deaths
        texts = []
        if attempts != 1 or deaths:
            texts.append(ngettext("%d attempt", "%d attempts", attempts) % attempts)
        if deaths:
            texts.append(ngettext("%d death", "%d deaths", deaths) % deaths)
        return lines(*texts) if texts else None

    @admin.display(description=_("started at"), ordering="started_at")
    def started_and_took(self, record: IdempotencyRecord) -> str:
        if record.finished_at is None:
            return lines(self.started(record))
        took = duration((record.finished_at - record.started_at).total_seconds())
        return lines(self.started(record), gettext("took %s") % took)

    # -- the page of one record --------------------------------------------------------

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            remember(found, request)
            # First, because it refreshes a record whose run has just ended.
            note_states([found])
        return found

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        # Arguments may be private, so only those see them who must know what they run again. The
        # fingerprint that an earlier version has stored has no key, so arguments can be guessed.
        hidden = {"error_kind"}
        if obj is None or not outlook(obj):
            hidden |= {"next_delivery"}
        if not self.may_take_step(request, "rerun"):
            hidden |= {"arguments", "payload"}
        if not self.may_take_step(request, SEE_RESULTS):
            # A result or an answer may be what a customer was sent, and an error may quote it.
            hidden = hidden - {"error_kind"} | {"result_text", "error_text"}
        if obj is not None and not self._history_of(obj):
            hidden |= {"history"}
        return tuple(field for field in super().get_fields(request, obj) if field not in hidden)

    def get_inlines(self, request: HttpRequest, obj: Any) -> Any:
        # Not a table of nothing. One that cannot be read says so itself.
        sent = FollowUp.objects.using(database_of(request)).filter(record_id=getattr(obj, "pk", 0))
        return super().get_inlines(request, obj) if sent.exists() else []

    @admin.display(description=_("lock"))
    def lock(self, record: IdempotencyRecord) -> str:
        """The name of the record's lock, whether it is held now, and links to its pages."""
        alias, name, request = record.lock_alias, record.lock_name, request_of(record)
        shown: Any = breakable(name)
        try:
            info = locks[alias].get(name)
        except (BackendUnavailable, InvalidLockBackend) as error:
            state = format_html(
                "{} {}", badge("plain", _("not known")), gettext("No answer: %s") % error
            )
        else:
            if info is None:
                state = badge("plain", _("free"))
            elif info.owner == record.owner:
                state = badge(*_HELD.get(info.holder_state, ("good", _("held now"))))
            else:
                state = badge("warn", _("held by another run"))
            if info is not None and request is not None:
                shown = lock_link(request, self.admin_site.name, alias, name)
        events = ""
        if request is not None and request.user.has_perm("django_dlock.view_lockevent"):
            url = events_url(self.admin_site.name, alias, name)
            link = '<a href="{}">{}</a>' if url else ""
            events = format_html(link, url, _("Events of this lock"))
        return format_html(
            '<div class="dlock-lines"><div>{} {}</div><div>{}</div><div>{}</div></div>',
            shown,
            state,
            gettext("alias %s") % alias if tells_alias(alias) else "",
            events,
        )

    @admin.display(description=_("arguments"))
    def arguments(self, record: IdempotencyRecord) -> str:
        if record.message is None:
            return gettext(
                "Not stored, so the task cannot be run again here: this is not a task, or it has "
                "store_arguments=False, or its arguments are too long or cannot be written as "
                "JSON, or an older version of django-dlock wrote the record."
            )
        return long_text(_arguments(record.message))

    @admin.display(description=_("result"))
    def result_text(self, record: IdempotencyRecord) -> str:
        return long_text(_pretty(record.result))

    @admin.display(description=_("error"))
    def error_text(self, record: IdempotencyRecord) -> str:
        return long_text(record.error)

    @admin.display(description=_("error"))
    def error_kind(self, record: IdempotencyRecord) -> str:
        """The type of the error, for those who may not see its text."""
        found = _KIND.match(record.error)
        return gettext("%(type)s; you may not see its text") % {
            "type": gettext("not known") if found is None else found[0]
        }

    @admin.display(description=_("history"))
    def history(self, record: IdempotencyRecord) -> str:
        return self._history_of(record)

    def _history_of(self, record: IdempotencyRecord) -> str:
        """Read once for each page, which asks first whether there is any."""
        request = request_of(record)
        if request is None:
            return ""
        if _HISTORY not in vars(record):
            vars(record)[_HISTORY] = history_of(record, request) or ""
        return str(vars(record)[_HISTORY])

    def facts_of(self, record: IdempotencyRecord) -> dict[str, Any]:
        return {
            "key": printable(record.key),
            "scope": printable(record.scope),
            "worker": printable(record.worker or ""),
            "task_id": printable(record.task_id or ""),
            "state": self.state_badge(record),
            "started": self.started(record),
            "finished": self.finished(record) if record.finished_at else "",
            "arguments": self.arguments(record),
            "outlook": outlook(record),
            "outlook_after_rerun": outlook_after_rerun(record),
        }


def _pretty(text: str) -> str:
    """JSON on several lines; any other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _arguments(message: str) -> str:
    """The arguments of a message; in the words of its publisher, if it has hidden them."""
    try:
        stored = json.loads(message)
        words = stored.get("options") or {}
        shown = {
            part: words.get(f"{part}repr", value)
            for part, value in (("args", stored["args"]), ("kwargs", stored["kwargs"]))
        }
        return json.dumps(shown, indent=2, ensure_ascii=False)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # Not written by us, so nobody knows what is in it.
        return gettext("They cannot be read.")
