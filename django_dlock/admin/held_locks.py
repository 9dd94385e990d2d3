"""The page of held locks, read live from every alias, and the guarded release of locks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.core.exceptions import PermissionDenied
from django.db import Error, router, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..lease import LeaseInfo
from ..models import HeldLock
from ..operators import audit
from ..operators.inspection import AliasQuery, age_text, break_lease, is_running
from ..text.printable import printable
from .base import CHANGE, atomic_in, badge, breakable, log
from .cells import holder_of, known, time_left, with_damage, with_deadlock, with_late_renewal
from .changelist import HeldLockChangeList, alias_and_name, as_row
from .filters import (
    HOLDER_STATES,
    KINDS,
    AgeFilter,
    AliasFilter,
    HolderStateFilter,
    KindFilter,
    TextFilter,
    WaitingFilter,
)
from .labelled_columns import LabelledColumns
from .links import page_url
from .lock_page import LockPageAdmin

_STYLES = {"alive": "good", "silent": "warn", "dead": "bad", "unknown": "plain"}


class ReleaseForm(forms.Form):
    """The operator's confirmation. The page also posts the owner of each lock that it showed."""

    force = forms.BooleanField(required=False)


def _column(
    description: Any,
    fact: str,
    show: Callable[[Any], Any] = lambda value: value,
    *,
    sortable: bool = True,
) -> Any:
    """A column that shows one attribute of a lease."""

    @admin.display(description=description, ordering=fact if sortable else None)
    def column(self: Any, row: HeldLock) -> Any:
        return show(known(row.info, fact))

    return column


@admin.register(HeldLock)
class HeldLockAdmin(LabelledColumns, LockPageAdmin):
    """The locks that are held now, and who holds them."""

    steps = ("release",)
    list_display = (*("lock_name", "state", "age", "waiting", "holder", "release_link"),)
    unlabelled = ("lock_name", "state", "release_link")
    list_filter = (
        *(TextFilter, AliasFilter, HolderStateFilter, WaitingFilter, KindFilter, AgeFilter),
    )
    list_per_page = 50
    search_fields = ("name",)
    search_help_text = _("Part of the lock name, task, task id or path (case-sensitive)")
    actions = ("release_selected",)
    actions_on_bottom = False
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "admin/django_dlock/heldlock/change_list.html"

    class Media:
        css = {"all": ("django_dlock/locks.css",)}
        js = ("django_dlock/refresh.js",)

    # -- reading -----------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> QuerySet[HeldLock]:
        # There is no table: the change list and ``get_object`` ask the backends.
        return HeldLock.objects.none()

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[HeldLockChangeList]:
        return HeldLockChangeList

    def get_list_display(self, request: HttpRequest) -> tuple[Any, ...]:
        hidden = () if self.may_take_step(request, "release") else ("release_link",)
        return self.labelled(column for column in self.list_display if column not in hidden)

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        # Leave out actions of the whole site, which expect rows of a table.
        actions = super().get_actions(request)
        return {name: action for name, action in actions.items() if name == "release_selected"}

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> HeldLock | None:
        # Check this before asking a backend, so that nobody can find out which locks exist.
        if not self.has_view_permission(request):
            raise PermissionDenied
        alias, name = alias_and_name(object_id)
        try:
            info = locks[alias].get(name) if alias in locks else None
        except (BackendUnavailable, InvalidLockBackend) as error:
            self.message_user(request, str(error), messages.ERROR)
            return None
        if info is None:
            self.message_user(request, self._gone(name), messages.WARNING)
            return None
        return as_row(info, request)

    def _gone(self, name: str) -> str:
        return gettext("The lock “%(name)s” is not held any more.") % {"name": printable(name)}

    # -- columns -----------------------------------------------------------------------

    kind = _column(_("kind"), "kind", lambda kind: dict(KINDS).get(kind, kind))

    @admin.display(description=_("age"), ordering="age")
    def age(self, row: HeldLock) -> str:
        return age_text(row.info)

    renewals = _column(_("renewals"), "renewals")
    waiting = _column(_("waiting"), "waiting")
    # As text, because thousands separators would make it hard to compare with log lines.
    token = _column(_("token"), "token", str)

    @admin.display(description=_("name"), ordering="name")
    def lock_name(self, row: HeldLock) -> str:
        name = breakable(row.info.name)
        if not row.shows_alias:
            return name
        # In the link, because another alias may have a lock of the same name.
        alias = printable(row.info.alias)
        return format_html('{} <span class="dlock-alias">{}</span>', name, alias)

    @admin.display(description=_("state"), ordering="holder_state")
    def holder_state(self, row: HeldLock) -> str:
        state = row.info.holder_state
        return with_damage(badge(_STYLES[state], dict(HOLDER_STATES)[state]), row.info)

    @admin.display(description=_("state"), ordering="holder_state")
    def state(self, row: HeldLock) -> str:
        if row.info.kind == "held":
            shown = with_late_renewal(self.holder_state(row), row.info)
        else:
            # It belongs to no process that could have a state.
            shown = with_damage(badge("plain", self.kind(row)), row.info)
        url = page_url(self.admin_site.name, "heldlock", "blocking") if row.in_deadlock else ""
        return with_deadlock(shown, url)

    @admin.display(description=_("holder"), ordering="holder")
    def holder(self, row: HeldLock) -> str:
        return holder_of(row.info) or str(self.get_empty_value_display())

    @admin.display(description=_("TTL left"), ordering="ttl")
    def ttl(self, row: HeldLock) -> str:
        return time_left(row.info)

    @admin.display(description=_("release"))
    def release_link(self, row: HeldLock) -> str:
        url = page_url(self.admin_site.name, "heldlock", "release", row.pk)
        # For screen readers, which would otherwise read the same text for every link.
        label = gettext("Release the lock “%(name)s”") % {"name": row.shown_name}
        return format_html('<a href="{}" aria-label="{}">{}…</a>', url, label, _("Release"))

    # -- the one write -----------------------------------------------------------------

    def confirm_view(self, request: HttpRequest, object_id: str, step: str) -> HttpResponseBase:
        return self._release_all(request, [object_id])

    def has_release_permission(self, request: HttpRequest) -> bool:
        return self.may_take_step(request, "release")

    @admin.action(description=_("Release selected locks"), permissions=["release"])
    def release_selected(
        self, request: HttpRequest, queryset: QuerySet[HeldLock]
    ) -> HttpResponseBase:
        return self._release_all(request, request.POST.getlist(ACTION_CHECKBOX_NAME))

    def _release_all(self, request: HttpRequest, object_ids: list[str]) -> HttpResponseBase:
        """Release the confirmed locks, and show a confirmation page for the others."""
        owners = request.POST.getlist("owner")
        seen = dict(zip(object_ids, owners, strict=False))
        form = ReleaseForm(request.POST if owners else None)
        force = form.is_valid() and form.cleaned_data["force"]
        left, silent, refused = [], set[str](), False
        rows = audit.BreakRows("operator", user=request.user.get_username())
        for row in self._held(request, object_ids):
            info, owner = row.info, seen.get(row.pk)
            # Only a damaged entry has no owner.
            if owner is None or (info.owner and not owner) or info.alias in silent:
                left.append(row)
            elif owner != info.owner:
                self._tell_changed_hands(request, info)
            elif is_running(info) and not force:
                left.append(row)
                refused = True
            elif not self._release(request, row, rows):
                # Every further question to a dead server would take its whole command timeout.
                silent.add(info.alias)
        self._tell_unwritten(request, rows)
        if not left:
            return self.to_list(request)
        # Not in ``fields``: a bound field has copied its label when the form was checked.
        form["force"].label = ngettext("Release it anyway", "Release them anyway", len(left))
        if refused:
            text = ngettext(
                "Its holder may still be running: tick this box to release it.",
                "Their holders may still be running: tick this box to release them.",
                len(left),
            )
            form.add_error("force", text)
        return self.confirmation(
            request,
            left[0] if len(left) == 1 else None,
            "release",
            form=form,
            title=ngettext("Release a held lock", "Release held locks", len(left)),
            rows=[
                {
                    "pk": row.pk,
                    "info": row.info,
                    "shown_name": row.shown_name,
                    "state": self.holder_state(row),
                    "holder": holder_of(row.info),
                    "age": self.age(row),
                    "ttl": self.ttl(row),
                    "waiting": self.waiting(row),
                    "is_running": is_running(row.info),
                }
                for row in left
            ],
            may_be_awaited=any(row.info.waiting or "waiting" in row.info.unknown for row in left),
            may_be_running=any(is_running(row.info) for row in left),
        )

    def _held(self, request: HttpRequest, object_ids: list[str]) -> list[HeldLock]:
        """The chosen locks that are still held; shows a message about each of the others."""
        chosen = list(dict.fromkeys(map(alias_and_name, object_ids)))
        alias_query = AliasQuery(dict.fromkeys(alias for alias, _name in chosen))
        found = alias_query.ask(
            lambda backend: {n: backend.get(n) for alias, n in chosen if alias == backend.alias}
        )
        for problem in alias_query.problems.values():
            self.message_user(request, problem, messages.ERROR)
        rows = []
        for alias, name in chosen:
            info = found.get(alias, {}).get(name)
            if info is not None:
                rows.append(as_row(info, request))
            elif alias in found:
                self.message_user(request, self._gone(name), messages.WARNING)
        return rows

    def _tell_changed_hands(self, request: HttpRequest, info: LeaseInfo) -> None:
        text = gettext("The lock “%(name)s” now has another owner. It was not released.")
        self.message_user(request, text % {"name": printable(info.name)}, messages.WARNING)

    def _release(self, request: HttpRequest, row: HeldLock, rows: audit.BreakRows) -> bool:
        """Release one lock and show the outcome; returns whether its backend answered."""
        info, names = row.info, {"name": row.shown_name, "alias": row.info.alias}
        database = router.db_for_write(LogEntry)
        broken = False
        try:
            # Log it first: a release without a trace is worse than a transaction that stays open
            # for one command. Lock events may be in a database that does not answer.
            with atomic_in(database):
                self._log(request, row)
                broken = break_lease(info, reason="operator")
                transaction.set_rollback(not broken, using=database)
        except Error as error:
            if broken:
                text = gettext(
                    "The lock “%(name)s” was released, but this may not be logged. %(error)s"
                )
                rows.add(info)
            else:
                text = gettext(
                    "The lock “%(name)s” was not released, because the release cannot be logged. "
                    "Are all migrations applied? %(error)s"
                )
            self.message_user(request, text % {**names, "error": error}, messages.ERROR)
            return True
        except BackendUnavailable as error:
            text = gettext(
                "No answer: the lock “%(name)s” may or may not have been released. %(error)s"
            )
            text %= {**names, "error": error}
            self.message_user(request, text, messages.ERROR)
            try:
                # In a savepoint, so that a failure does not undo what the request has written.
                with atomic_in(database):
                    log(request, row, CHANGE, text)
            except Error as trouble:
                self.message_user(request, str(trouble), messages.ERROR)
            return False
        if not broken:
            self._tell_missed(request, info)
            return True
        rows.add(info)
        text = gettext("The lock “%(name)s” of alias “%(alias)s” was released.") % names
        if info.holder_state != "dead" and info.kind == "held":
            text += " " + gettext("Its holder continues until its next renewal.")
        self.message_user(request, text, messages.SUCCESS)
        return True

    def _tell_unwritten(self, request: HttpRequest, rows: audit.BreakRows) -> None:
        for problem, infos in rows.unwritten().items():
            text = gettext("Lock events may not have been written: %(names)s. %(error)s")
            names = ", ".join(f"“{printable(info.name)}”" for info in infos)
            text %= {"names": names, "error": printable(problem)}
            self.message_user(request, text, messages.ERROR)

    def _tell_missed(self, request: HttpRequest, info: LeaseInfo) -> None:
        """Say why nothing was released: its holder or another operator was faster."""
        try:
            is_free = locks[info.alias].get(info.name) is None
        except BackendUnavailable:
            is_free = False
        if is_free:
            self.message_user(request, self._gone(info.name), messages.WARNING)
        else:
            self._tell_changed_hands(request, info)

    def _log(self, request: HttpRequest, row: HeldLock) -> None:
        text = gettext("Released; its holder was %(state)s, its owner %(owner)s.")
        state = dict(HOLDER_STATES)[row.info.holder_state]
        log(request, row, CHANGE, text % {"state": state, "owner": row.info.owner})
