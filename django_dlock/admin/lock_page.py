"""The page of a lock: why it does not move, who holds it, who waits, and what one can do."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils.translation import gettext

from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..lease import LeaseInfo
from ..models import LockEvent
from ..operators.blocking import Blocking, LockId, survey
from ..operators.inspection import AliasQuery
from ..text.names import check_name
from ..text.printable import printable
from .advice import Reading, steps_for, verdict
from .base import breakable
from .blocking_page import BlockingAdmin
from .changelist import alias_and_name, as_row
from .events import LockEventAdmin
from .filters import known_aliases
from .links import id_of, lock_url, page_url
from .lock_past import Past
from .people import People

WAITERS, CHAIN = 100, 20
"""The most that is shown of each."""


class LockPageAdmin(BlockingAdmin):
    """The page of one name, whether somebody holds it or not, in the place of a form."""

    def get_urls(self) -> list[URLPattern]:
        view, name = self.admin_site.admin_view, f"django_dlock_{self.opts.model_name}"
        former = path("<path:object_id>/why/", view(self.why_view), name=f"{name}_why")
        return [former, *super().get_urls()]

    def why_view(self, request: HttpRequest, object_id: str) -> HttpResponseBase:
        """The former address of the page, which bookmarks and messages may have."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        url = lock_url(self.admin_site.name, *alias_and_name(unquote(object_id)))
        query = request.META.get("QUERY_STRING", "")
        return HttpResponseRedirect(f"{url}?{query}" if query else url)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        # Check this before asking a backend, so that nobody can find out which locks exist.
        if object_id is None or request.method == "POST" or not self.has_view_permission(request):
            raise PermissionDenied
        alias, name = lock = alias_and_name(unquote(object_id))
        aliases, problem = known_aliases()
        if alias not in aliases:
            text = gettext("DLOCKS has no alias “%(alias)s”.") % {"alias": printable(alias)}
            return self._to_list_with(request, problem or text)
        reading = read(lock)
        if reading.info is None:
            try:
                check_name(name)
            except ValueError as error:
                return self._to_list_with(request, str(error))
        return self._lock_page(request, lock, reading, aliases, extra_context or {})

    def _lock_page(
        self,
        request: HttpRequest,
        lock: LockId,
        reading: Reading,
        aliases: list[str],
        extra_context: dict[str, Any],
    ) -> HttpResponseBase:
        (alias, name), query = lock, AliasQuery(aliases)
        if reading.problem:
            # Every further question to a dead server would take its whole command timeout.
            query.problems[alias] = reading.problem
        found = survey(query)
        blocking = _with(found.blocking, lock, reading)
        row = as_row(reading.info, request) if reading.info is not None else None
        info, people = reading.info, People(request, self.admin_site.name)
        waits = blocking.chain(lock)
        stuck = {each for circle in blocking.deadlocks for each in circle}
        waiters = [people.waiter(blocking, waiter) for waiter in reading.waiters]
        may_release = info is not None and self.may_take_step(request, "release")
        page_of = {
            step: page_url(self.admin_site.name, self.opts.model_name or "", step, id_of(*lock))
            for step in ("history", "release")
        }
        facts = {
            "title": printable(name),
            "name": breakable(name),
            "alias": alias,
            "original": row,
            "problem": reading.problem,
            "untold": reading.untold,
            "other_problems": {a: p for a, p in query.problems.items() if a != alias},
            "verdict": verdict(reading, waits, stuck, in_deadlock=lock in stuck),
            "holder": people.holder(info) if info is not None else None,
            "waits": [people.wait(blocking, lock, waiter) for waiter in waits[:CHAIN]],
            "look_at": people.link(waits[-1]) if waits and lock not in stuck else "",
            "in_deadlock": lock in stuck,
            "is_complete": found.is_complete,
            "untold_aliases": [other for other in found.untold if other != alias],
            "waiters": waiters,
            "waiters_hold": any(waiter["holds"] for waiter in waiters),
            "more_waiters": _more_than_read(reading),
            "steps": steps_for(
                lock,
                reading,
                in_deadlock=lock in stuck,
                release_url=page_of["release"] if may_release else "",
            ),
            "past": Past(request, LockEventAdmin(LockEvent, self.admin_site), lock, info),
            "history_url": page_of["history"] if info is not None else "",
        }
        return self.live_page(request, "lock", **{**facts, **extra_context})

    def _to_list_with(self, request: HttpRequest, text: str) -> HttpResponseRedirect:
        self.message_user(request, text, messages.WARNING)
        return self.to_list(request)

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> HttpResponseRedirect:
        # A lock that nobody holds any more still has a past, and perhaps waiters.
        lock = alias_and_name(unquote(object_id))
        return HttpResponseRedirect(lock_url(self.admin_site.name, *lock))


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


def _more_than_read(reading: Reading) -> int:
    if reading.info is None or not reading.waiters:
        return 0
    return max(0, reading.info.waiting - len(reading.waiters))


def _with(blocking: Blocking, lock: LockId, reading: Reading) -> Blocking:
    """What was read of all locks, with what was read of this one."""
    if reading.problem:
        return blocking
    leases = {**blocking.leases}
    leases.pop(lock, None)
    if reading.info is not None:
        leases[lock] = reading.info
    return Blocking(leases.values(), {**blocking.waiters, lock: reading.waiters})
