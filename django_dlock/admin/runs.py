"""How the pages show the run of a record: whether its process is gone, and what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import Max, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import IdempotencyRecord
from ..records.liveness import INTERRUPTED, NEEDED, RunState, states_of
from .base import BoundedPaginator, badge, lines, local_text, request_of

State = IdempotencyRecord.State
_STYLES: dict[str, str] = {
    State.RUNNING: "plain",
    State.WAITING: "warn",
    State.SUCCEEDED: "good",
    State.FAILED: "bad",
}
_REASONS: dict[RunState, Any] = {
    "dead": _("its process is gone"),
    "unlocked": _("it holds its lock no longer"),
    "silent": _("no sign of life"),
    "unknown": _("not known whether it still runs"),
}
_NOTED = "_dlock_run_state"
MOST_FOUND = 1000
"""Runs that the filter shows, the latest ones."""


def note_states(records: Sequence[IdempotencyRecord]) -> None:
    """Find out the states of the runs of a page, with one question for each alias."""
    states = states_of(records)
    for record in records:
        vars(record)[_NOTED] = states.get(record.pk)


def state_of(record: IdempotencyRecord) -> RunState | None:
    """The state of the run; ``None`` if the record is not of a run in progress."""
    if _NOTED not in vars(record):
        note_states([record])
    found: RunState | None = vars(record)[_NOTED]
    return found


def state_text(record: IdempotencyRecord) -> str:
    """The state of a record in words, in one line."""
    state = state_of(record)
    if state is None or state == "alive":
        return str(record.get_state_display())
    return f"{_word(record, state)}: {_REASONS[state]}"


def shown_state(record: IdempotencyRecord) -> SafeString:
    """The state of a record as a badge; below it, why it is interrupted.

    In a list, also when its message comes again, which a page of its own says at length.
    """
    state = state_of(record)
    if state is None or state == "alive":
        # A newer version may know other states.
        return badge(_STYLES.get(record.state, "plain"), record.get_state_display())
    style = "bad" if state in INTERRUPTED else "warn" if state == "silent" else "plain"
    notes = [str(_REASONS[state])]
    if state in INTERRUPTED and request_of(record) is None:
        notes.append(_briefly_next(record))
    shown = (format_html('<span class="dlock-quiet">{}</span>', note) for note in notes if note)
    return lines(badge(style, _word(record, state)), *shown)


def _word(record: IdempotencyRecord, state: RunState) -> str:
    return gettext("interrupted") if state in INTERRUPTED else str(record.get_state_display())


# -- what comes next -------------------------------------------------------------------------


def outlook(record: IdempotencyRecord) -> str:
    """What will happen to an interrupted run; empty if there is nothing to say."""
    state = state_of(record)
    if state not in INTERRUPTED and state != "silent":
        return ""
    parts = []
    if state == "unlocked":
        parts.append(
            gettext(
                "Its lock has ended, so its process is probably gone; this is not proven. The "
                "next delivery takes over."
            )
        )
    elif state == "silent":
        parts.append(
            gettext(
                "Its process may wake up. If it does not, the next delivery takes over when the "
                "lock has ended."
            )
        )
    return " ".join([*parts, _next_delivery(record)])


def outlook_after_rerun(record: IdempotencyRecord) -> str:
    """What the message of an interrupted run will do if its task is run again by hand."""
    if state_of(record) not in INTERRUPTED:
        return ""
    found = _redelivery(record)
    if found is not None and found.when == "never":
        return _next_delivery(record)
    return " ".join(
        [
            _next_delivery(record),
            gettext(
                "You need not run it again. If you do, whichever of the two messages comes second "
                "finds the outcome of the first, and does not run the work a second time."
            ),
        ]
    )


def _redelivery(record: IdempotencyRecord) -> Any:
    """See ``redelivery_of``; ``None`` if there is no Celery here."""
    try:
        # Imported here, because it imports Celery.
        from ..celery.publishing.redelivery import redelivery_of
    except ModuleNotFoundError:
        return None
    return redelivery_of(record)


def _next_delivery(record: IdempotencyRecord) -> str:
    if not record.task_id:
        return gettext(
            "This is not a task: nobody delivers it again. It runs when its client sends the "
            "request again."
        )
    found = _redelivery(record)
    if found is None or found.when == "unknown":
        if found is not None and found.transport:
            text = gettext("It is not known when a broker such as %(broker)s delivers it again.")
            return text % {"broker": found.transport}
        return gettext(
            "It is not known when the message of this run comes again: this process knows no "
            "broker."
        )
    broker = {"broker": found.transport}
    if found.when == "never":
        if not found.transport:
            return gettext("It ran in the process of its caller: it has no message.")
        return (
            gettext(
                "The broker (%(broker)s) deletes a message when a worker receives it, so the "
                "message of this run does not come again."
            )
            % broker
        )
    if found.when == "at_once":
        return gettext(
            "The broker delivers the message of this run again as soon as it notices that the "
            "connection of the worker has ended: usually at once, if another worker of the queue "
            "is running."
        )
    facts = {"time": local_text(found.at)}
    if found.at <= timezone.now():
        text = gettext(
            "The broker was to deliver the message of this run again by %(time)s (visibility "
            "timeout): it does so when a worker of the queue is running."
        )
    else:
        text = gettext(
            "The broker delivers the message of this run again at about %(time)s (visibility "
            "timeout), or earlier, if a worker of the queue is running."
        )
    return text % facts


def _briefly_next(record: IdempotencyRecord) -> str:
    """When the message comes again, for a column; empty if that is not known."""
    found = _redelivery(record)
    if found is None or found.when == "unknown":
        return ""
    if found.when == "never":
        return gettext("not delivered again")
    if found.when == "at_once":
        return gettext("delivered again at once")
    date, time = local_text(found.at).split()
    today = date == local_text(timezone.now()).split()[0]
    times = [time[:5]] if today else [date, time[:5]]
    parts = format_html_join(" ", '<span class="dlock-when">{}</span>', ([part] for part in times))
    return format_html("{} {}", gettext("delivered again at about"), parts)


# -- the filter ------------------------------------------------------------------------------


class RunFilter(admin.SimpleListFilter):
    """Which runs that are recorded as running are not; among the latest records."""

    title = _("run")
    parameter_name = "run"
    CHOICES = (
        ("interrupted", _("interrupted"), INTERRUPTED),
        ("silent", _("no sign of life"), frozenset(["silent"])),
        ("unknown", _("not known"), frozenset(["unknown"])),
    )

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(value, text) for value, text, _states in self.CHOICES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        if self.value() is None:
            return queryset
        wanted = next((states for value, _t, states in self.CHOICES if value == self.value()), None)
        if wanted is None:
            raise IncorrectLookupParameters
        records = IdempotencyRecord.objects.using(queryset.db)
        newest = records.aggregate(pk=Max("pk"))["pk"] or 0
        # No index has the state, so only the latest records are read.
        running = records.filter(state=State.RUNNING, pk__gt=newest - BoundedPaginator.MAX_ROWS)
        states = states_of(running.only(*NEEDED))
        found = sorted(pk for pk, state in states.items() if state in wanted)
        return queryset.filter(pk__in=found[-MOST_FOUND:])
