"""What belongs to a held lock: its task, its idempotency record and its events."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

from django.db import Error, transaction
from django.db.models import Max, Q
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from ..lease import LeaseInfo
from ..models import IdempotencyRecord
from ..task_url import url_of_task
from .base import BoundedPaginator
from .databases import DatabaseFilter, databases
from .links import events_url, page_url, task_link

__all__ = ["links_of", "record_of", "record_url"]


def links_of(request: HttpRequest, site: str, info: LeaseInfo) -> SafeString | None:
    """Links to what this visitor may see; ``None`` if there is nothing."""
    links = list(_links(request, site, info))
    if not links:
        return None
    parts = format_html_join("", "<div>{}</div>", ((link,) for link in links))
    return format_html('<div class="dlock-links">{}</div>', parts)


def _links(request: HttpRequest, site: str, info: LeaseInfo) -> Iterator[SafeString]:
    address = url_of_task(info.metadata.get("task_id"))
    if address:
        yield task_link(address, gettext("Task"))
    if request.user.has_perm("django_dlock.view_idempotencyrecord"):
        record = record_of(info)
        if record is not None:
            yield format_html(
                '<a href="{}">{} <bdi>{}</bdi></a>',
                record_url(site, record),
                gettext("Idempotency record"),
                record,
            )
    if request.user.has_perm("django_dlock.view_lockevent"):
        address = events_url(site, info.alias, info.name)
        yield format_html('<a href="{}">{}</a>', address, gettext("Events of this lock"))


def record_of(info: LeaseInfo) -> IdempotencyRecord | None:
    """The record of the run that holds the lock; else the latest one of the lock or of its task.

    The latter in the first database that has one. Only the latest records are searched, because
    none of these columns has an index.
    """
    wanted = Q(owner=info.owner) | Q(lock_alias=info.alias, lock_name=info.name)
    task_id = info.metadata.get("task_id")
    # Another program may have written anything else.
    if task_id and isinstance(task_id, str) and len(task_id) <= 255:
        wanted |= Q(task_id=task_id)
    other: IdempotencyRecord | None = None
    for database in databases():
        if other is not None and not {"task_id", "path"} & info.metadata.keys():
            # Neither a task nor a request holds the lock, so no run does.
            break
        records = IdempotencyRecord.objects.using(database)
        try:
            # A savepoint if the request has a transaction, which then stays usable after an error.
            with transaction.atomic(using=database):
                newest = records.aggregate(pk=Max("pk"))["pk"] or 0
                latest = records.filter(wanted, pk__gt=newest - BoundedPaginator.MAX_ROWS)
                found = list(latest.defer("message", "result", "error").order_by("-pk")[:100])
        except (Error, ValueError):
            # Another page says so; this one is about the lock. A damaged name or owner may have
            # characters that the database does not take.
            continue
        for record in found:
            if record.owner == info.owner:
                return record
        other = other or next(iter(found), None)
        wanted = Q(owner=info.owner) if other is not None else wanted
    return other


def record_url(site: str, record: IdempotencyRecord) -> str:
    """The page of a record, in whichever database it is."""
    address = page_url(site, "idempotencyrecord", "change", record.pk)
    database = record._state.db
    if database == databases()[0]:
        return address
    filters = urlencode({DatabaseFilter.parameter_name: database})
    return f"{address}?{urlencode({'_changelist_filters': filters})}"
