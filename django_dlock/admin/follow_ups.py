"""Messages that runs have sent: those of one record, and the page of all that are pending."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.db import Error
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..databases.errors import explained
from ..models import FollowUp
from .base import (
    CHANGE,
    BoundedChangeList,
    BoundedPaginator,
    ReadOnlyAdmin,
    badge,
    lines,
    log,
    long_text,
    time_of,
)
from .databases import DatabaseFilter, InChosenDatabase, database_of
from .labelled_columns import LabelledColumns
from .text_columns import PrintableColumns

LONGEST_ID = 19
"""Digits; ids with fewer ones fit into the column."""


class FollowUps(PrintableColumns, admin.TabularInline):  # type: ignore[type-arg] # no generic at run time
    """The messages that the record's runs have sent, and whether the broker has them."""

    model = FollowUp
    fields = readonly_fields = ("task", "task_id", "created", "published", "error")
    created = time_of("created_at", _("created at"))
    published = time_of("published_at", _("published at"))
    ordering = ("-id",)
    extra = 0
    can_delete = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[FollowUp]:
        return super().get_queryset(request).using(database_of(request)).defer("message")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # Follow-ups are part of the record.
        return request.user.has_perm("django_dlock.view_idempotencyrecord")


class PublishedFilter(admin.SimpleListFilter):
    """Pending messages, unless others are asked for."""

    title = _("published")
    parameter_name = "published"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("yes", _("published")), ("all", _("all"))]

    def choices(self, changelist: Any) -> Iterator[Any]:
        for value, title in ((None, _("pending")), *self.lookup_choices):
            without = [self.parameter_name] if value is None else []
            parameters = {} if value is None else {self.parameter_name: value}
            yield {
                "selected": self.value() == value,
                "query_string": changelist.get_query_string(parameters, without),
                "display": title,
            }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() == "all":
            return queryset
        return queryset.filter(published_at__isnull=self.value() != "yes")


@admin.register(FollowUp)
class FollowUpAdmin(LabelledColumns, InChosenDatabase, ReadOnlyAdmin):
    """Messages of committed runs; by default only those that no broker has confirmed."""

    list_display = ("task_wrapped", "state_and_time", "created", "error_wrapped")
    unlabelled = ("task_wrapped", "state_and_time")
    list_filter = (DatabaseFilter, PublishedFilter)
    search_fields = ("=task_id", "task")
    search_help_text = _("By the task id, or by a part of the task's name")
    ordering = ("-id",)
    actions = ("publish_selected",)
    actions_on_bottom = False
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    fields = ("task", "task_id", "state", "record_id", "created", "published", "expires", "failure")
    readonly_fields = fields
    optional_fields = {"published": "published_at", "failure": "error"}

    created = time_of("created_at", _("created at"))
    published = time_of("published_at", _("published at"))
    expires = time_of("expires_at", _("expires at"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).defer("message")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        titles = {"yes": _("Published outbox messages"), "all": _("Outbox messages")}
        chosen = request.GET.get(PublishedFilter.parameter_name, "")
        title = titles.get(chosen, _("Pending outbox messages"))
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[BoundedChangeList]:
        return BoundedChangeList

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        # Leave out actions of the whole site, which may delete rows.
        actions = super().get_actions(request)
        return {name: action for name, action in actions.items() if name == "publish_selected"}

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> Any:
        # Django looks for whatever was posted, and fails if it is no number, or a huge one.
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        if not all(key.isdecimal() and len(key) < LONGEST_ID for key in chosen):
            raise BadRequest("The id of a selected outbox message is no number")
        return super().response_action(request, queryset, *args, **kwargs)

    def has_publish_permission(self, request: HttpRequest) -> bool:
        may = request.user.has_perm("django_dlock.publish_followup")
        return may and self.has_view_permission(request)

    @admin.display(description=_("state"))
    def state(self, follow_up: FollowUp) -> str:
        if follow_up.published_at is not None:
            return badge("good", _("published"))
        return badge("bad" if follow_up.error else "warn", _("pending"))

    @admin.display(description=_("state"), ordering="published_at")
    def state_and_time(self, follow_up: FollowUp) -> str:
        state = self.state(follow_up)
        return lines(state, self.published(follow_up)) if follow_up.published_at else lines(state)

    @admin.display(description=_("task"), ordering="task")
    def task_wrapped(self, follow_up: FollowUp) -> str:
        return lines(follow_up.task)

    @admin.display(description=_("error"))
    def error_wrapped(self, follow_up: FollowUp) -> str:
        return lines(follow_up.error[:200]) if follow_up.error else self.get_empty_value_display()

    @admin.display(description=_("error"))
    def failure(self, follow_up: FollowUp) -> str:
        return long_text(follow_up.error)

    @admin.action(description=_("Publish selected outbox messages now"), permissions=["publish"])
    def publish_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Publish what is pending; harmless if a worker does the same, as the task id stays."""
        # Imported here, because it imports Celery.
        from ..celery.publishing import follow_ups

        chosen = list(queryset.filter(published_at__isnull=True).values_list("pk", flat=True))
        published, outage = 0, None
        try:
            for follow_up in follow_ups.publish_chosen(queryset.db, chosen):
                published += 1
                log(request, follow_up, CHANGE, gettext("Published by hand."))
        except (Error, follow_ups.Unpublished) as error:
            outage = explained(error, queryset.db) if isinstance(error, Error) else error
        text = ngettext(
            "%(count)d outbox message was published.",
            "%(count)d outbox messages were published.",
            published,
        )
        self.message_user(request, text % {"count": published}, messages.SUCCESS)
        if outage is not None:
            self.message_user(request, str(outage), messages.ERROR)
        elif published < len(chosen):
            text = gettext("Not every message can be published; the errors in the list say why.")
            self.message_user(request, text, messages.WARNING)
