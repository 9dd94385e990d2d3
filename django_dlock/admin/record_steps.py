"""The guarded steps of an idempotency record: forget it, and run its task again."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import LogEntry
from django.db import Error, router, transaction
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..databases.errors import of_ours
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..models import FollowUp, IdempotencyRecord, LockEvent
from ..operators import audit
from ..records import retention
from .base import DELETION, GuardedAdmin, atomic_in, log

State = IdempotencyRecord.State

FORCE = {
    "forget": (_("Forget it anyway"), _("Tick this box to forget it anyway.")),
    "rerun": (_("Run it again anyway"), _("Tick this box to run it again anyway.")),
}
"""The label of the box, and the error without it."""


class StepForm(forms.Form):
    """The operator's confirmation, with the attempt, the state and the owner that they saw."""

    # No database has room for a higher number in this column.
    attempt = forms.IntegerField(max_value=2**31 - 1, widget=forms.HiddenInput)
    state = forms.ChoiceField(choices=State.choices, widget=forms.HiddenInput)
    owner = forms.CharField(required=False, widget=forms.HiddenInput, strip=False)
    force = forms.BooleanField(required=False)


class RecordSteps(GuardedAdmin):
    """Each step changes a record only if it is as the operator saw it."""

    steps = ("forget", "rerun")

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> HttpResponseRedirect:
        self.message_user(request, gettext("There is no such record."), messages.WARNING)
        return super()._get_obj_does_not_exist_redirect(request, opts, object_id)

    def confirm_view(self, request: HttpRequest, object_id: str, step: str) -> HttpResponseBase:
        record: IdempotencyRecord | None = self.get_object(request, object_id)
        if record is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if step == "rerun" and record.message is None:
            text = gettext("“%(record)s” cannot be run again: its arguments were not stored.")
            self.message_user(request, text % {"record": record}, messages.WARNING)
            return self.to_list(request)
        obstacle = obstacle_to(step, record)
        seen = {"attempt": record.attempt, "state": record.state, "owner": record.owner}
        form = StepForm(request.POST if request.method == "POST" else None, initial=seen)
        form.fields["force"].label, unforced = FORCE[step]
        if form.is_valid():
            if obstacle is None or form.cleaned_data["force"]:
                # The statement that deletes compares them: if the run succeeded just now and its
                # record were deleted all the same, the work would be done twice.
                for fact in seen:
                    setattr(record, fact, form.cleaned_data[fact])
                take = self._forget if step == "forget" else self._run_again
                take(request, record)
                return self.to_list(request)
            form.add_error("force", unforced)
        return self.confirmation(
            request,
            record,
            step,
            form=form,
            title=gettext("Forget an idempotency record")
            if step == "forget"
            else gettext("Run a task again"),
            obstacle=obstacle,
            **self.facts_of(record),
        )

    def facts_of(self, record: IdempotencyRecord) -> dict[str, Any]:
        """What the confirmation page shows of the record."""
        raise NotImplementedError

    def _forget(self, request: HttpRequest, record: IdempotencyRecord) -> None:
        committing = False
        try:
            others = router.db_for_write(LockEvent), router.db_for_write(LogEntry)
            with atomic_in(record._state.db, *others):
                forgotten = retention.forget_record(record)
                if forgotten is not None:
                    log(request, record, DELETION, _text_of_forgetting(record))
                    user = request.user.get_username()
                    retention.note_forgotten(record, forgotten, reason="operator", user=user)
                    committing = True
        except Error as error:
            if committing:
                text = gettext("“%(record)s” may or may not have been forgotten. %(error)s")
            else:
                text = gettext("“%(record)s” was not forgotten. %(error)s")
            facts = {"record": record, "error": _told(error, record)}
            self.message_user(request, text % facts, messages.ERROR)
            return
        if forgotten is None:
            self._tell_changed(request, record)
            return
        text = gettext("“%(record)s” was forgotten: its next delivery runs like the first one.")
        self.message_user(request, text % {"record": record}, messages.SUCCESS)

    def _run_again(self, request: HttpRequest, record: IdempotencyRecord) -> None:
        # Imported here, because it imports Celery.
        from ..celery.publishing import rerun

        using = record._state.db
        others = router.db_for_write(LockEvent), router.db_for_write(LogEntry)
        committing = False
        try:
            with atomic_in(using, *others):
                follow_up = rerun.forget_and_write(record)
                if follow_up is not None:
                    self._write_down(request, record, follow_up)
                    committing = True
        except rerun.Unreadable as error:
            text = gettext("“%(record)s” cannot be run again: its message is damaged (%(error)s).")
            self.message_user(request, text % {"record": record, "error": error}, messages.ERROR)
            return
        except Error as error:
            if committing:
                text = gettext(
                    "“%(record)s” may or may not have been forgotten. If it was, its task is a "
                    "pending outbox message, which runs when it is published. %(error)s"
                )
            else:
                text = gettext(
                    "“%(record)s” was not run again. Are all migrations applied? %(error)s"
                )
            facts = {"record": record, "error": _told(error, record)}
            self.message_user(request, text % facts, messages.ERROR)
            return
        if follow_up is None:
            self._tell_changed(request, record)
            return
        facts = {"record": record, "id": follow_up.task_id}
        text = gettext(
            "“%(record)s” was forgotten, and its task is published again, as %(id)s, once this "
            "request is committed."
        )
        level = messages.SUCCESS

        def publish() -> None:
            nonlocal text, level
            try:
                published = rerun.publish(follow_up)
            except rerun.Unpublished as error:
                published, facts["error"] = False, error
            if published:
                text = gettext("“%(record)s” runs again, as task %(id)s.")
                return
            level = messages.WARNING
            text = gettext(
                "“%(record)s” was forgotten, and its task is not published yet: the outbox "
                "message of task %(id)s is pending. Publish it from the page of outbox messages, "
                "or with publish_pending_followups. %(error)s"
            )
            facts.setdefault("error", "")

        # At once, unless the project has ATOMIC_REQUESTS.
        transaction.on_commit(publish, using)
        self.message_user(request, text % facts, level)

    def _write_down(
        self, request: HttpRequest, record: IdempotencyRecord, follow_up: FollowUp
    ) -> None:
        facts = {"state": record.get_state_display(), "attempt": record.attempt}
        text = gettext("Run again in state %(state)s at attempt %(attempt)d, as task %(id)s.")
        log(request, record, DELETION, text % {**facts, "id": follow_up.task_id})
        audit.record(
            LockEvent.Event.RERUN,
            name=record.lock_name,
            alias=record.lock_alias,
            owner=record.owner,
            token=record.token,
            reason="operator",
            user=request.user.get_username(),
            detail={
                "scope": record.scope,
                "key": record.key,
                "state": record.state,
                "attempt": record.attempt,
                "task_name": follow_up.task,
                "task_id": record.task_id,
                "new_task_id": follow_up.task_id,
            },
        )

    def _tell_changed(self, request: HttpRequest, record: IdempotencyRecord) -> None:
        text = gettext("“%(record)s” has changed since this page was loaded. Nothing was done.")
        self.message_user(request, text % {"record": record}, messages.WARNING)


def _text_of_forgetting(record: IdempotencyRecord) -> str:
    facts = {"state": record.get_state_display(), "attempt": record.attempt}
    return gettext("Forgotten in state %(state)s at attempt %(attempt)d.") % facts


def obstacle_to(step: str, record: IdempotencyRecord) -> str | None:
    """Why a step should not be taken; ``None`` if no run of the record is in progress."""
    replaced = record.ending == IdempotencyRecord.Ending.REPLACED and record.state != State.FAILED
    if step == "rerun" and replaced:
        return gettext("Its task has replaced itself, and the replacement has not ended yet.")
    try:
        alive = retention.is_alive(record)
    except (BackendUnavailable, InvalidLockBackend) as error:
        return gettext("It is not known whether its run is still alive: %(error)s") % {
            "error": error
        }
    if alive:
        return gettext("Its run is in progress. It would find its record gone, and run again.")
    if step == "forget" and retention.has_pending(record):
        return gettext(
            "Messages that its run has sent are not published yet, and would be deleted. Publish "
            "them first, from the page of outbox messages."
        )
    return None


def _told(error: Error, record: IdempotencyRecord) -> Error:
    # The events may be in a database of their own.
    is_of_events = LockEvent._meta.db_table in str(error)
    using = router.db_for_write(LockEvent) if is_of_events else record._state.db
    return of_ours(error, str(using))
