"""What has happened to a record: the events of its lock, and what operators did."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import Error
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from ..databases.errors import of_ours
from ..models import IdempotencyRecord, LockEvent
from ..text.printable import printable
from .base import local_text, may_see_users

MOST = 20
"""Rows of each kind."""


class Row(NamedTuple):
    when: datetime
    what: str
    why: str
    who: str


def history_of(record: IdempotencyRecord, request: HttpRequest) -> SafeString | None:
    """The latest rows as a table, the latest first; ``None`` if there are none."""
    try:
        rows = sorted((*_events(record, request), *_entries(record)), reverse=True)
    except Error as error:
        return format_html("<p>{}</p>", of_ours(error, str(record._state.db)))
    if not rows:
        return None
    hide = not may_see_users(request)
    body = format_html_join(
        "",
        '<tr><td class="dlock-time">{}</td><td>{}</td><td>{}</td><td>{}</td></tr>',
        (
            (
                local_text(row.when),
                *(printable(text) for text in (row.what, row.why, "" if hide else row.who)),
            )
            for row in rows
        ),
    )
    return format_html(
        '<div class="dlock-scroll"><table class="dlock-history">{}</table></div>', body
    )


def _events(record: IdempotencyRecord, request: HttpRequest) -> Iterator[Row]:
    if not (record.lock_name and request.user.has_perm("django_dlock.view_lockevent")):
        return
    found = LockEvent.objects.filter(name=record.lock_name, alias=record.lock_alias)
    for event in found.order_by("-when")[:MOST]:
        # Some databases compare without regard to case.
        if event.name == record.lock_name:
            why = event.reason.replace("_", " ")
            yield Row(event.when, str(event.get_event_display()), why, event.user)


def _entries(record: IdempotencyRecord) -> Iterator[Row]:
    """Also those about earlier records of the key, which were forgotten."""
    text = str(record)[:200]
    entries: Any = LogEntry.objects.filter(
        content_type=ContentType.objects.get_for_model(record), object_repr=text
    )
    for entry in entries.select_related("user").order_by("-action_time")[:MOST]:
        if entry.object_repr == text:
            yield Row(entry.action_time, entry.get_change_message(), "", str(entry.user))
