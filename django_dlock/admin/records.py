"""The page of idempotency records, and the guarded "forget" of one of them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..models import IdempotencyRecord
from .base import DELETION, ReadOnlyAdmin, badge, log

__all__ = ["IdempotencyRecordAdmin"]

State = IdempotencyRecord.State
_LOOKS = {State.RUNNING: "plain", State.WAITING: "warn", State.SUCCEEDED: "good"}


class ForgetForm(forms.Form):
    """The operator's confirmation: which run, in which state, they saw."""

    attempt = forms.IntegerField(widget=forms.HiddenInput)
    state = forms.ChoiceField(choices=State.choices, widget=forms.HiddenInput)
    force = forms.BooleanField(required=False, label=_("Forget it all the same"))


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ReadOnlyAdmin[IdempotencyRecord]):
    """What became of each business key."""

    list_display = (
        "key",
        "state_badge",
        "scope",
        "attempt",
        "deaths",
        "started_at",
        "finished_at",
        "expires_at",
        "task_id",
    )
    list_filter = ("state", "scope", "created_at", "expires_at")
    search_fields = ("key", "scope", "task_id", "lock_name")
    search_help_text = _("By key, scope, task id or lock")
    ordering = ("-id",)
    change_form_template = "admin/django_dlock/idempotencyrecord/change_form.html"

    @admin.display(description=_("state"), ordering="state")
    def state_badge(self, record: IdempotencyRecord) -> str:
        return badge(_LOOKS.get(State(record.state), "bad"), record.get_state_display())

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        context = {"may_forget": self.has_forget_permission(request), **(extra_context or {})}
        return super().changeform_view(request, object_id, form_url, context)

    # -- the one write -----------------------------------------------------------------

    def has_forget_permission(self, request: HttpRequest) -> bool:
        """To have work done again; of no use without the permission to see the record."""
        return self.has_view_permission(request) and request.user.has_perm(
            "django_dlock.forget_idempotencyrecord"
        )

    def get_urls(self) -> list[URLPattern]:
        forget = path(
            "<path:object_id>/forget/",
            self.admin_site.admin_view(self.forget_view),
            name="django_dlock_idempotencyrecord_forget",
        )
        return [forget, *super().get_urls()]

    def forget_view(self, request: HttpRequest, object_id: str) -> HttpResponseBase:
        """Ask for confirmation, then delete the record in the state that the operator saw."""
        if not self.has_forget_permission(request):
            raise PermissionDenied
        record = self.get_object(request, unquote(object_id))
        if record is None:
            self.message_user(request, gettext("There is no such record."), messages.WARNING)
            return self._to_list(request)
        obstacle = obstacle_to_forgetting(record)
        if request.method == "POST":
            form = ForgetForm(request.POST)
            if form.is_valid():
                if form.cleaned_data["force"] or obstacle is None:
                    self._forget(request, record, form)
                    return self._to_list(request)
                form.add_error("force", _("Tick this to forget it in spite of that."))
        else:
            form = ForgetForm(initial={"attempt": record.attempt, "state": record.state})
        context = {
            **self.admin_site.each_context(request),
            "title": gettext("Forget an idempotency record"),
            "opts": self.opts,
            "object": record,
            "state": self.state_badge(record),
            "obstacle": obstacle,
            "form": form,
            "media": self.media,
        }
        request.current_app = self.admin_site.name
        template = "admin/django_dlock/idempotencyrecord/forget.html"
        return TemplateResponse(request, template, context)

    def _forget(self, request: HttpRequest, record: IdempotencyRecord, form: ForgetForm) -> None:
        with transaction.atomic(using=router.db_for_write(IdempotencyRecord)):
            # Compared in the statement that deletes: the run may end at this very moment, and a
            # success that nobody remembers is done twice.
            deleted, _per_model = IdempotencyRecord.objects.filter(
                pk=record.pk, attempt=form.cleaned_data["attempt"], state=form.cleaned_data["state"]
            ).delete()
            if deleted:
                log(
                    request,
                    record,
                    DELETION,
                    gettext("Forgotten in state %(state)s at attempt %(attempt)d.")
                    % {"state": record.get_state_display(), "attempt": record.attempt},
                )
        if deleted:
            text = gettext("“%(record)s” was forgotten: its next delivery runs as the first.")
            self.message_user(request, text % {"record": record}, messages.SUCCESS)
        else:
            text = gettext("“%(record)s” has changed since you looked. Nothing was done.")
            self.message_user(request, text % {"record": record}, messages.WARNING)

    def _to_list(self, request: HttpRequest) -> HttpResponseRedirect:
        url = "admin:django_dlock_idempotencyrecord_changelist"
        return HttpResponseRedirect(reverse(url, current_app=self.admin_site.name))


def obstacle_to_forgetting(record: IdempotencyRecord) -> str | None:
    """Why the record should be left alone, ``None`` where nothing is at work on it."""
    if record.state != State.RUNNING:
        return None
    try:
        info = locks[record.lock_alias].get(record.lock_name)
    except (BackendUnavailable, InvalidLockBackend) as error:
        return gettext("It cannot be told whether its run is still alive: %(error)s") % {
            "error": error
        }
    if info is None or info.owner != record.owner or info.holder_state == "dead":
        return None
    return gettext("Its run is under way: it would find its record gone, and run again.")
