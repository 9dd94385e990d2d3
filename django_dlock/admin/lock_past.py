"""What happened to a lock, and its idempotency records, as far as a visitor may see them."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import Error, router, transaction
from django.db.models import Model
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext

from .. import tenancy
from ..databases.errors import explained
from ..lease import LeaseInfo
from ..models import IdempotencyRecord, LockEvent
from ..operators.blocking import LockId
from ..text.printable import printable
from .base import BoundedPaginator, may_see_users
from .events import LockEventAdmin
from .links import events_url
from .related import record_of, record_url
from .runs import note_states, outlook, state_text

EVENTS, RECORDS = 20, 5
"""The most that is shown of each."""


class Past:
    """The events of the last day, and the records.

    Attributes:
        events: Rows of a table, the newest first.
        more_events: Whether there were more on that day.
        events_url: The list of all events of the lock; empty if the visitor may not see it.
        problems: What could not be read → why.
    """

    def __init__(
        self, request: HttpRequest, page: LockEventAdmin, lock: LockId, info: LeaseInfo | None
    ) -> None:
        self._page, self._site = page, page.admin_site.name
        self._lock, self._info = lock, info
        self.events: list[dict[str, Any]] = []
        self.more_events = False
        self.events_url = ""
        self.records: list[dict[str, Any]] = []
        self.problems: dict[str, str] = {}
        if request.user.has_perm("django_dlock.view_lockevent"):
            self.events_url = events_url(self._site, *lock)
            try:
                events = self._read_events(sees_users=may_see_users(request))
                self.events, self.more_events = events[:EVENTS], len(events) > EVENTS
            # A damaged name may have characters that the database does not take.
            except (Error, ValueError) as error:
                self.problems[gettext("The lock events cannot be read.")] = _told(error, LockEvent)
        if request.user.has_perm("django_dlock.view_idempotencyrecord"):
            try:
                self.records = self._read_records()
            except (Error, ValueError) as error:
                text = gettext("The idempotency records cannot be read.")
                self.problems[text] = _told(error, IdempotencyRecord)

    @property
    def have_durations(self) -> bool:
        return any(event["duration"] for event in self.events)

    @property
    def have_holders(self) -> bool:
        return any(event["holder"] for event in self.events)

    def _read_events(self, *, sees_users: bool) -> list[dict[str, Any]]:
        alias, name = self._lock
        since = timezone.now() - dt.timedelta(days=1)
        # A failed statement must not spoil a transaction of the request.
        with transaction.atomic(using=router.db_for_read(LockEvent)):
            found = LockEvent.objects.filter(alias=alias, name=name, when__gte=since)
            events = list(found.order_by("-when", "-id")[: EVENTS + 1])
        return [
            {
                "at": self._page.at(event),
                "what": self._page.what(event),
                "why": self._page.why(event),
                "duration": self._page.duration(event) or "",
                "holder": self._page.holder(event) or "",
                "user": printable(event.user) if sees_users else "",
            }
            for event in events
        ]

    def _read_records(self) -> list[dict[str, Any]]:
        alias, name = self._lock
        info, using = self._info, router.db_for_read(IdempotencyRecord)
        with transaction.atomic(using=using):
            records = IdempotencyRecord.objects.using(using).defer("message", "result", "error")
            newest = records.order_by("-pk").values_list("pk", flat=True).first() or 0
            of_lock = records.filter(lock_alias=alias, lock_name=name)
            # The name of a lock has no index.
            latest = of_lock.filter(pk__gt=newest - BoundedPaginator.MAX_ROWS)
            found = {record.pk: record for record in latest.order_by("-pk")[:RECORDS]}
            task = info.metadata.get("task_name") if info is not None else None
            if isinstance(task, str):
                # Of a task without a ``lock_key`` of its own, the key is the name of the lock.
                tenant, key = tenancy.split(name)
                digest = IdempotencyRecord.digest_of(tenancy.prefixed(tenant, task), key)
                found |= {record.pk: record for record in of_lock.filter(digest=digest)}
        # Also that of the holder's task, in whichever database it is.
        of_holder = record_of(info) if info is not None else None
        # Django compares records without their database.
        first = [] if of_holder is None else [of_holder]
        others = [
            record
            for record in found.values()
            if of_holder is None
            or (record.pk, record._state.db) != (of_holder.pk, of_holder._state.db)
        ]
        shown = [*first, *others]
        # Two databases may use the same keys; the other record's state is found when it is shown.
        note_states([record for record in shown if record._state.db == using])
        return [
            {
                "text": str(record),
                "state": state_text(record),
                "outlook": outlook(record),
                "url": record_url(self._site, record),
            }
            for record in shown
        ]


def _told(error: Exception, model: type[Model]) -> str:
    told = explained(error, router.db_for_read(model)) if isinstance(error, Error) else error
    return str(told)
