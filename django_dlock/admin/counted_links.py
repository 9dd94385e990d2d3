"""The lists that show one by one what the page of lock statistics counts."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from django.conf import settings
from django.contrib.admin import AdminSite
from django.db.models import Model
from django.http import HttpRequest
from django.utils.timezone import get_default_timezone

from ..models import HeldLock, LockEvent
from .figures import Figures
from .links import page_url

ENDS_WHILE_HELD = (LockEvent.Event.LOST, LockEvent.Event.MAX_HOLD)
"""The events that are counted as losses."""


class CountedLinks:
    """Addresses for one visitor; each is empty if that list is not in this site, or not for them.

    Args:
        figures: Of which alias and time the lists show what happened.
    """

    def __init__(self, request: HttpRequest, site: AdminSite, figures: Figures) -> None:
        self._request, self._site, self._figures = request, site, figures

    def losses(self, reason: str = "") -> str:
        """Locks that ended while held; for one reason, or for all."""
        return self._events(ENDS_WHILE_HELD, **({"reason": reason} if reason else {}))

    def long_waits(self) -> str:
        """Grants that came after ``signals.LONG_WAIT`` seconds."""
        return self._events([LockEvent.Event.LONG_WAIT])

    def held_now(self) -> str:
        """Locks that are held now."""
        return self._list(HeldLock, "changelist", {"kind": "held", **self._alias})

    def waiting_now(self) -> str:
        """Who waits now, and for whom."""
        return self._list(HeldLock, "blocking", {})

    @property
    def _alias(self) -> dict[str, str]:
        return {"alias": self._figures.alias} if self._figures.alias else {}

    def _events(self, events: Sequence[LockEvent.Event], **filters: str) -> str:
        start, end = self._figures.starts[0], self._figures.end
        period = {"when__gte": _written(start), "when__lt": _written(end)}
        # Django's filter takes several of them.
        chosen = {"event__exact": [event.value for event in events]}
        return self._list(LockEvent, "changelist", {**chosen, **filters, **self._alias, **period})

    def _list(self, model: type[Model], page: str, query: Mapping[str, str | list[str]]) -> str:
        found = self._site._registry.get(model)
        if found is None or not found.has_view_permission(self._request):
            return ""
        url = page_url(self._site.name, str(model._meta.model_name), page)
        return f"{url}?{urlencode(query, doseq=True)}" if query else url


def _written(seconds: int) -> str:
    """A time as a filter of a list takes it, in the zone that the table's column has."""
    zone = dt.timezone.utc if settings.USE_TZ else get_default_timezone()
    when = dt.datetime.fromtimestamp(seconds, zone)
    return str(when if settings.USE_TZ else when.replace(tzinfo=None))
