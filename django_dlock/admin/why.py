"""Two pages that say why nothing moves: of one name, and of all locks that others wait for."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import Error, router, transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.translation import gettext

from .. import tenancy
from ..blocking import Blocking, LockId, survey
from ..database_errors import explained
from ..database_time import local_time
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..inspection import AliasQuery
from ..lease import LeaseInfo
from ..models import IdempotencyRecord, LockEvent
from ..names import check_name
from ..printable import printable
from .advice import Reading, steps_for, verdict
from .base import BoundedPaginator, GuardedAdmin, may_see_users
from .changelist import alias_and_name
from .events import LockEventAdmin
from .filters import known_aliases
from .links import events_url, id_of, page_url, why_url
from .people import People
from .related import record_of, record_url
from .runs import note_states, outlook, state_text

__all__ = ["WhyAdmin"]

WAITERS, EVENTS, RECORDS, CHAIN = 100, 20, 5, 20
"""The most that the page of one name shows of each."""
NAMES, WAITERS_OF_EACH = 100, 20
"""What is read of each alias to find out who waits for whom."""


class WhyAdmin(GuardedAdmin):
    """The pages "Why does nothing move?" and "Who blocks whom"."""

    class Media:
        css = {"all": ("django_dlock/why.css",)}

    def get_urls(self) -> list[URLPattern]:
        view, name = self.admin_site.admin_view, f"django_dlock_{self.opts.model_name}"
        return [
            path("blocking/", view(self.blocking_view), name=f"{name}_blocking"),
            path("<path:object_id>/why/", view(self.why_view), name=f"{name}_why"),
            *super().get_urls(),
        ]

    def blocking_view(self, request: HttpRequest) -> HttpResponseBase:
        """Which holder waits for which lock, over all aliases."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        aliases, settings_problem = known_aliases()
        query = AliasQuery(aliases)
        found = survey(query, names=NAMES, waiters=WAITERS_OF_EACH)
        people, blocking = People(request, self.admin_site.name), found.blocking
        return self._page(
            request,
            "blocking",
            title=gettext("Who blocks whom"),
            settings_problem=settings_problem,
            problems=query.problems,
            deadlocks=[people.deadlock(blocking, circle) for circle in blocking.deadlocks],
            rows=[people.line(line) for line in blocking.lines()],
            names_read=found.names_read,
            is_complete=found.is_complete,
            untold_aliases=found.untold,
            names_limit=NAMES,
            waiters_limit=WAITERS_OF_EACH,
        )

    def why_view(self, request: HttpRequest, object_id: str) -> HttpResponseBase:
        """What is known of one name, whether it is held or not."""
        # Check this before asking a backend, so that nobody can find out which locks exist.
        if not self.has_view_permission(request):
            raise PermissionDenied
        alias, name = lock = alias_and_name(unquote(object_id))
        aliases, _settings_problem = known_aliases()
        try:
            check_name(name)
            if alias not in aliases:
                raise ValueError(gettext("DLOCKS has no alias “%(alias)s”.") % {"alias": alias})
        except (TypeError, ValueError) as error:
            self.message_user(request, str(error), messages.WARNING)
            return self.to_list(request)
        reading, query = read(lock), AliasQuery(aliases)
        if reading.problem:
            # Every further question to a dead server would take its whole command timeout.
            query.problems[alias] = reading.problem
        found = survey(query, names=NAMES, waiters=WAITERS_OF_EACH)
        blocking = _with(found.blocking, lock, reading)
        info, waiters = reading.info, reading.waiters
        people, site = People(request, self.admin_site.name), self.admin_site.name
        in_deadlock = any(lock in circle for circle in blocking.deadlocks)
        waits = blocking.chain(lock)
        release = "release" if self.may_take_step(request, "release") else ""
        return self._page(
            request,
            "why",
            title=gettext("Why does nothing move?"),
            name=printable(name),
            alias=alias,
            info=info,
            change_url=page_url(site, "heldlock", "change", id_of(*lock))
            if info is not None
            else "",
            problem=reading.problem,
            untold=reading.untold,
            other_problems={a: p for a, p in query.problems.items() if a != alias},
            verdict=verdict(reading, waits, in_deadlock=in_deadlock),
            holder=people.holder(info) if info is not None else None,
            waits=[people.wait(blocking, waiter) for waiter in waits[:CHAIN]],
            in_deadlock=in_deadlock,
            is_complete=found.is_complete,
            untold_aliases=[other for other in found.untold if other != alias],
            waiters=[people.waiter(blocking, waiter) for waiter in waiters],
            more_waiters=max(0, info.waiting - len(waiters)) if info and waiters else 0,
            steps=steps_for(
                lock,
                reading,
                in_deadlock=in_deadlock,
                release_url=release and page_url(site, "heldlock", release, id_of(*lock)),
            ),
            **self._past(request, lock, info),
        )

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> HttpResponseRedirect:
        # A lock that nobody holds any more still has a past, and perhaps waiters.
        return HttpResponseRedirect(
            why_url(self.admin_site.name, *alias_and_name(unquote(object_id)))
        )

    def _page(self, request: HttpRequest, page: str, **facts: Any) -> TemplateResponse:
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "read_at": f"{local_time(timezone.now()):%H:%M:%S}",
            **facts,
        }
        return TemplateResponse(request, f"admin/django_dlock/heldlock/{page}.html", context)

    # -- tables --------------------------------------------------------------------------

    def _past(self, request: HttpRequest, lock: LockId, info: LeaseInfo | None) -> dict[str, Any]:
        """The events of the last day, and the records; ``None`` if the visitor may not see them."""
        events = records = None
        problems: dict[str, str] = {}
        may_see_events = request.user.has_perm("django_dlock.view_lockevent")
        if may_see_events:
            try:
                events = self._events(request, lock)
            # A damaged name may have characters that the database does not take.
            except (Error, ValueError) as error:
                problems[gettext("The lock events cannot be read.")] = _told(error, LockEvent)
        if request.user.has_perm("django_dlock.view_idempotencyrecord"):
            try:
                records = self._records(lock, info)
            except (Error, ValueError) as error:
                text = gettext("The idempotency records cannot be read.")
                problems[text] = _told(error, IdempotencyRecord)
        more_events = events is not None and len(events) > EVENTS
        return {
            "events": events and events[:EVENTS],
            "events_known": events is not None,
            "more_events": more_events,
            "events_url": events_url(self.admin_site.name, *lock) if may_see_events else "",
            "records": records,
            "past_problems": problems,
        }

    def _events(self, request: HttpRequest, lock: LockId) -> list[dict[str, Any]]:
        alias, name = lock
        since = timezone.now() - dt.timedelta(days=1)
        # A failed statement must not spoil a transaction of the request.
        with transaction.atomic(using=router.db_for_read(LockEvent)):
            found = LockEvent.objects.filter(alias=alias, name=name, when__gte=since)
            events = list(found.order_by("-when", "-id")[: EVENTS + 1])
        page, sees_users = LockEventAdmin(LockEvent, self.admin_site), may_see_users(request)
        return [
            {
                "at": page.at(event),
                "what": page.what(event),
                "why": page.why(event),
                "duration": page.duration(event) or "",
                "holder": page.holder(event) or "",
                "user": printable(event.user) if sees_users else "",
            }
            for event in events
        ]

    def _records(self, lock: LockId, info: LeaseInfo | None) -> list[dict[str, Any]]:
        alias, name = lock
        using = router.db_for_read(IdempotencyRecord)
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
        shown = {(record.pk, record._state.db) for record in found.values()}
        others = (
            [] if of_holder is None or (of_holder.pk, of_holder._state.db) in shown else [of_holder]
        )
        note_states(list(found.values()))
        return [
            {
                "text": str(record),
                "state": state_text(record),
                "outlook": outlook(record),
                "url": record_url(self.admin_site.name, record),
            }
            for record in [*others, *found.values()]
        ]


def read(lock: LockId) -> Reading:
    """Ask the backend of one alias; never raises for one that does not answer."""
    alias, name = lock
    info: LeaseInfo | None = None
    try:
        backend = locks[alias]
        info = backend.get(name)
        return Reading(info, backend.waiters(name, limit=WAITERS))
    except NotImplementedError as error:
        return Reading(info, untold=f"{error}.")
    except (BackendUnavailable, InvalidLockBackend) as error:
        return Reading(info, problem=str(error))


def _told(error: Exception, model: type[Model]) -> str:
    told = explained(error, router.db_for_read(model)) if isinstance(error, Error) else error
    return str(told)


def _with(blocking: Blocking, lock: LockId, reading: Reading) -> Blocking:
    """What was read of all locks, with what was read of this one."""
    if reading.problem:
        return blocking
    leases = {**blocking.leases}
    leases.pop(lock, None)
    if reading.info is not None:
        leases[lock] = reading.info
    return Blocking(leases.values(), {**blocking.waiters, lock: reading.waiters})
