"""The page of idempotency records, and the guarded step to forget one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.db import DatabaseError, connections, router, transaction
from django.db.models import Max, Q, QuerySet
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import retention
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..models import FollowUp, IdempotencyRecord
from .base import (
    DELETION,
    BoundedPaginator,
    GuardedAdmin,
    badge,
    lines,
    log,
    time_of,
)
from .links import LinkedToLock

__all__ = ["IdempotencyRecordAdmin"]

State = IdempotencyRecord.State
_STYLES = {State.RUNNING: "plain", State.WAITING: "warn", State.SUCCEEDED: "good"}


class ForgetForm(forms.Form):
    """The operator's confirmation, with the attempt and state that they saw."""

    attempt = forms.IntegerField(widget=forms.HiddenInput)
    state = forms.ChoiceField(choices=State.choices, widget=forms.HiddenInput)
    force = forms.BooleanField(required=False, label=_("Forget it anyway"))


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
            if router.allow_migrate(alias, "django_dlock", model_name="idempotencyrecord")
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
    """The choice of a database; ``IdempotencyRecordAdmin.get_queryset`` applies it."""

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


MOST_SCOPES = 50


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
        return [(scope, scope) for scope in first_scopes(database_of(request))]

    def has_output(self) -> bool:
        return True

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.value() is None else queryset.filter(scope=self.value())


class RecordChangeList(ChangeList):
    """The list of records, without long columns that it does not show."""

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> QuerySet[Any]:
        return super().get_queryset(request, *args, **kwargs).defer("result", "error")

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if not (self.query or self.has_active_filters):
            # Without this, Django would offer "Show all" although nothing is left out.
            self.full_result_count = self.result_count
        if not self.multi_page:
            # Without this, Django would search the table a second time.
            self.result_list = self.paginator.page(1).object_list


class FollowUps(admin.TabularInline):  # type: ignore[type-arg] # no generic at run time
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


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(LinkedToLock, GuardedAdmin):
    """The state of each business key."""

    steps = ("forget",)
    list_display = (
        "key",
        "state_badge",
        "scope_wrapped",
        "attempt",
        "deaths",
        "started",
        "finished",
        "expires",
        "task_id",
    )
    list_filter = (DatabaseFilter, "state", ScopeFilter, "created_at", "expires_at")
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    paginator = BoundedPaginator
    search_fields = ("key", "scope", "=task_id", "lock_name")
    search_help_text = _(
        "All records by the whole key or scope; the latest %(count)d also by a part of the key, "
        "scope or lock, or by the task id"
    ) % {"count": BoundedPaginator.LONGEST}
    ordering = ("-id",)
    change_list_template = "admin/django_dlock/idempotencyrecord/change_list.html"
    change_form_template = "admin/django_dlock/idempotencyrecord/change_form.html"
    inlines = (FollowUps,)
    fields = (
        "scope",
        "key",
        "payload",
        "state_badge",
        "attempt",
        "deaths",
        "lock_alias",
        "lock",
        "owner",
        "token",
        "task_id",
        "step",
        "ending",
        "result",
        "error",
        "created",
        "started",
        "finished",
        "expires",
    )
    lock_fields = ("lock_alias", "lock_name")
    readonly_fields = ("state_badge", "lock", "created", "started", "finished", "expires")

    created = time_of("created_at", _("created at"))
    started = time_of("started_at", _("started at"))
    finished = time_of("finished_at", _("finished at"))
    expires = time_of("expires_at", _("expires at"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[IdempotencyRecord]:
        return super().get_queryset(request).using(database_of(request))

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
        latest = queryset.filter(pk__gt=newest - self.paginator.LONGEST)
        return exactly | super().get_search_results(request, latest, search_term)[0], False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[RecordChangeList]:
        return RecordChangeList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        try:
            return super().changelist_view(request, extra_context)
        except DatabaseError as error:
            database = database_of(request)
            if database == databases()[0]:
                raise
            text = gettext("The records of database “%(database)s” cannot be read: %(error)s")
            facts = {"database": database, "error": error}
            self.message_user(request, text % facts, messages.ERROR)
            return HttpResponseRedirect(request.path)

    @admin.display(description=_("state"), ordering="state")
    def state_badge(self, record: IdempotencyRecord) -> str:
        return badge(_STYLES.get(State(record.state), "bad"), record.get_state_display())

    @admin.display(description=_("scope"), ordering="scope")
    def scope_wrapped(self, record: IdempotencyRecord) -> str:
        return lines(record.scope)

    # -- the one write -----------------------------------------------------------------

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> HttpResponseRedirect:
        self.message_user(request, gettext("There is no such record."), messages.WARNING)
        return super()._get_obj_does_not_exist_redirect(request, opts, object_id)

    def confirm_view(self, request: HttpRequest, object_id: str, step: str) -> HttpResponseBase:
        record = self.get_object(request, object_id)
        if record is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        obstacle = obstacle_to_forgetting(record)
        seen = {"attempt": record.attempt, "state": record.state}
        form = ForgetForm(request.POST if request.method == "POST" else None, initial=seen)
        if form.is_valid():
            if obstacle is None or form.cleaned_data["force"]:
                self._forget(request, record, form)
                return self.to_list(request)
            form.add_error("force", _("Tick this box to forget it anyway."))
        return self.confirmation(
            request,
            record,
            step,
            form=form,
            title=gettext("Forget an idempotency record"),
            state=self.state_badge(record),
            started=self.started(record),
            finished=self.finished(record),
            obstacle=obstacle,
        )

    def _forget(self, request: HttpRequest, obj: IdempotencyRecord, form: ForgetForm) -> None:
        # The statement that deletes compares the attempt and state. If the run succeeds right now
        # and its record were deleted, its work would be done twice.
        obj.attempt, obj.state = form.cleaned_data["attempt"], form.cleaned_data["state"]
        with transaction.atomic(using=obj._state.db):
            deleted = retention.delete(obj.as_it_was())
            if deleted:
                log(
                    request,
                    obj,
                    DELETION,
                    gettext("Forgotten in state %(state)s at attempt %(attempt)d.")
                    % {"state": obj.get_state_display(), "attempt": obj.attempt},
                )
        if deleted:
            text = gettext("“%(record)s” was forgotten: its next delivery runs like the first one.")
            self.message_user(request, text % {"record": obj}, messages.SUCCESS)
        else:
            text = gettext("“%(record)s” has changed since this page was loaded. Nothing was done.")
            self.message_user(request, text % {"record": obj}, messages.WARNING)


def obstacle_to_forgetting(record: IdempotencyRecord) -> str | None:
    """Why the record should not be deleted; ``None`` if no run of it is in progress."""
    try:
        alive = retention.is_alive(record)
    except (BackendUnavailable, InvalidLockBackend) as error:
        return gettext("Cannot find out whether its run is still alive: %(error)s") % {
            "error": error
        }
    if not alive:
        return None
    return gettext("Its run is in progress. It would find its record gone, and run again.")
