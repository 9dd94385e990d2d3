"""The page of held locks, live from every alias, and the guarded release of one of them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, router, transaction
from django.db.models import QuerySet
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseRedirect,
)
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.timezone import localtime
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import lock_events
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..lease import LeaseInfo
from ..models import HeldLock, LockEvent
from ..operations import break_lease, duration, is_running
from .base import CHANGE, ReadOnlyAdmin, badge, log
from .changelist import (
    HOLDER_STATES,
    KINDS,
    AliasFilter,
    HeldLockChangeList,
    HolderStateFilter,
    KindFilter,
    as_row,
    place_of,
)

__all__ = ["HeldLockAdmin"]

_LOOKS = {"alive": "good", "silent": "warn", "dead": "bad", "unknown": "plain"}


class _NotShown(Http404):
    """The lock of this page is not held any more, or its alias does not answer."""


class ReleaseForm(forms.Form):
    """The operator's confirmation: whose lease it was that they saw."""

    owner = forms.CharField(widget=forms.HiddenInput)
    force = forms.BooleanField(required=False, label=_("Release it all the same"))


@admin.register(HeldLock)
class HeldLockAdmin(ReadOnlyAdmin[HeldLock]):
    """Who holds what, now."""

    list_display = (
        "lock_name",
        "holder_state",
        "age",
        "ttl",
        "holder",
        "waiting",
        "release_link",
        "kind",
        "alias",
        "renewals",
        "token",
    )
    list_filter = (AliasFilter, HolderStateFilter, KindFilter)
    list_per_page = 50
    search_fields = ("name",)
    search_help_text = _("A part of the name; case counts")
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "admin/django_dlock/heldlock/change_list.html"
    change_form_template = "admin/django_dlock/heldlock/change_form.html"
    fields = (
        "lock_name",
        "alias",
        "kind",
        "holder_state",
        "holder",
        "age",
        "acquired_at",
        "ttl",
        "renewals",
        "waiting",
        "token",
        "owner",
        "facts",
    )
    readonly_fields = fields

    class Media:
        js = ("django_dlock/refresh.js",)

    # -- reading -----------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[HeldLock]:
        # There is no table; the change list and ``get_object`` ask the backends.
        return HeldLock.objects.none()

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[HeldLockChangeList]:
        return HeldLockChangeList

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        hidden = () if self.has_release_permission(request) else ("release_link",)
        return tuple(column for column in self.list_display if column not in hidden)

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> HeldLock:
        # Told apart before anything is asked: a stranger must not learn which locks exist.
        if not self.has_view_permission(request):
            raise PermissionDenied
        alias, name = place_of(object_id)
        try:
            info = locks[alias].get(name) if alias in locks else None
        except (BackendUnavailable, InvalidLockBackend) as error:
            self._refuse(request, str(error), messages.ERROR)
        if info is None:
            text = gettext("The lock “%(name)s” is not held any more.") % {"name": name}
            self._refuse(request, text, messages.WARNING)
        return as_row(info, request)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        context = {
            "title": gettext("Held lock"),
            "may_release": self.has_release_permission(request),
            **(extra_context or {}),
        }
        try:
            return super().changeform_view(request, object_id, form_url, context)
        except _NotShown:
            return self._to_list(request)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        try:
            return super().history_view(request, object_id, extra_context)
        except _NotShown:
            return self._to_list(request)

    def _refuse(self, request: HttpRequest, text: str, level: int) -> NoReturn:
        self.message_user(request, text, level)
        raise _NotShown

    def _to_list(self, request: HttpRequest) -> HttpResponseRedirect:
        return HttpResponseRedirect(
            reverse("admin:django_dlock_heldlock_changelist", current_app=self.admin_site.name)
        )

    # -- columns -----------------------------------------------------------------------

    @admin.display(description=_("name"), ordering="name")
    def lock_name(self, row: HeldLock) -> str:
        return row.info.name

    @admin.display(description=_("kind"), ordering="kind")
    def kind(self, row: HeldLock) -> Any:
        return dict(KINDS).get(row.info.kind, row.info.kind)

    @admin.display(description=_("state"), ordering="holder_state")
    def holder_state(self, row: HeldLock) -> str:
        state = row.info.holder_state
        return badge(_LOOKS[state], dict(HOLDER_STATES)[state])

    @admin.display(description=_("holder"), ordering="holder", empty_value="-")
    def holder(self, row: HeldLock) -> str | None:
        process, metadata = row.info.process, row.info.metadata
        lines = [f"{process.host} · {process.pid}"] if process else []
        lines += [str(metadata[key]) for key in ("task_name", "task_id", "path") if key in metadata]
        if metadata.get("user"):
            lines.append(gettext("user %(user)s") % {"user": metadata["user"]})
        return format_html_join("", "<div>{}</div>", ((line,) for line in lines)) or None

    @admin.display(description=_("age"), ordering="age")
    def age(self, row: HeldLock) -> str:
        return duration(row.info.age)

    @admin.display(description=_("acquired at"))
    def acquired_at(self, row: HeldLock) -> str:
        return f"{localtime(row.info.acquired_at):%Y-%m-%d %H:%M:%S %Z}"

    @admin.display(description=_("TTL left"), ordering="ttl")
    def ttl(self, row: HeldLock) -> str:
        ttl = row.info.ttl
        return badge("bad", _("never ends")) if ttl is None else duration(ttl)

    @admin.display(description=_("renewals"), ordering="renewals")
    def renewals(self, row: HeldLock) -> int:
        return row.info.renewals

    @admin.display(description=_("token"), ordering="token")
    def token(self, row: HeldLock) -> str:
        # As text: grouped by thousands it could not be compared with a log line.
        return str(row.info.token)

    @admin.display(description=_("owner"))
    def owner(self, row: HeldLock) -> str:
        return row.info.owner

    @admin.display(description=_("waiting"), ordering="waiting")
    def waiting(self, row: HeldLock) -> int:
        return row.info.waiting

    @admin.display(description=_("facts"))
    def facts(self, row: HeldLock) -> str:
        text = json.dumps(dict(row.info.metadata), indent=2, ensure_ascii=False, default=str)
        return format_html('<pre class="dlock-facts">{}</pre>', text)

    @admin.display(description=_("release"))
    def release_link(self, row: HeldLock) -> str:
        url = reverse(
            "admin:django_dlock_heldlock_release",
            args=[quote(row.pk)],
            current_app=self.admin_site.name,
        )
        # Read aloud, a column of links that all say the same tells nothing.
        label = gettext("Release the lock “%(name)s”") % {"name": row.info.name}
        return format_html('<a href="{}" aria-label="{}">{}…</a>', url, label, _("Release"))

    # -- the one write -----------------------------------------------------------------

    def has_release_permission(self, request: HttpRequest) -> bool:
        """To end somebody's lease; of no use without the permission to see it."""
        user = request.user
        return self.has_view_permission(request) and user.has_perm("django_dlock.release_heldlock")

    def get_urls(self) -> list[URLPattern]:
        release = path(
            "<path:object_id>/release/",
            self.admin_site.admin_view(self.release_view),
            name="django_dlock_heldlock_release",
        )
        return [release, *super().get_urls()]

    def release_view(self, request: HttpRequest, object_id: str) -> HttpResponseBase:
        """Ask for confirmation, then end the lease that the operator saw and no other."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        try:
            row = self.get_object(request, unquote(object_id))
        except _NotShown:
            return self._to_list(request)
        info = row.info
        if request.method == "POST":
            form = ReleaseForm(request.POST)
            if form.is_valid():
                if form.cleaned_data["owner"] != info.owner:
                    self._tell_changed_hands(request, info)
                    return self._to_list(request)
                if form.cleaned_data["force"] or not is_running(info):
                    self._release(request, row)
                    return self._to_list(request)
                form.add_error("force", _("Its holder may be at work: tick this to end it."))
        else:
            form = ReleaseForm(initial={"owner": info.owner})
        context = {
            **self.admin_site.each_context(request),
            "title": gettext("Release a held lock"),
            "opts": self.opts,
            "object": row,
            "info": info,
            "state": self.holder_state(row),
            "holder": self.holder(row),
            "age": self.age(row),
            "ttl": self.ttl(row),
            "is_running": is_running(info),
            "form": form,
            "media": self.media,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_dlock/heldlock/release.html", context)

    def _tell_changed_hands(self, request: HttpRequest, info: LeaseInfo) -> None:
        text = gettext("The lock “%(name)s” has changed hands since you looked. Nothing was done.")
        self.message_user(request, text % {"name": info.name}, messages.WARNING)

    def _release(self, request: HttpRequest, row: HeldLock) -> None:
        info, names = row.info, {"name": row.info.name, "alias": row.info.alias}
        try:
            # The rows come first: a lock that was released and not written down is worse than
            # a transaction that is held open for one command.
            with transaction.atomic(using=router.db_for_write(LockEvent)):
                self._write_down(request, row)
                broken = break_lease(info, reason="operator")
                transaction.set_rollback(not broken, using=router.db_for_write(LockEvent))
        except DatabaseError as error:
            text = gettext(
                "The lock “%(name)s” was not released: that cannot be written down. Are all "
                "migrations applied? %(error)s"
            )
            self.message_user(request, text % {**names, "error": error}, messages.ERROR)
            return
        except BackendUnavailable as error:
            text = gettext(
                "No answer: the lock “%(name)s” may or may not have been released. %(error)s"
            )
            text %= {**names, "error": error}
            log(request, row, CHANGE, text)
            self.message_user(request, text, messages.ERROR)
            return
        if not broken:
            self._tell_changed_hands(request, info)
            return
        text = gettext("The lock “%(name)s” of alias “%(alias)s” was released.") % names
        if info.holder_state != "dead" and info.kind == "held":
            text += " " + gettext("Its holder works on until its next renewal, which tells it.")
        self.message_user(request, text, messages.SUCCESS)

    def _write_down(self, request: HttpRequest, row: HeldLock) -> None:
        info = row.info
        log(
            request,
            row,
            CHANGE,
            gettext("Released; its holder was %(state)s, its owner %(owner)s.")
            % {"state": dict(HOLDER_STATES)[info.holder_state], "owner": info.owner},
        )
        lock_events.record(
            LockEvent.Event.BROKEN,
            name=info.name,
            alias=info.alias,
            owner=info.owner,
            token=info.token,
            reason="operator",
            user=request.user.get_username(),
            detail=lock_events.facts(info),
        )
