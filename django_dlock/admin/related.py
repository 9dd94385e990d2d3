"""The idempotency record that belongs to a held lock."""

from __future__ import annotations

from urllib.parse import urlencode

from django.db import Error, transaction
from django.db.models import Max, Q

from ..lease import LeaseInfo
from ..models import IdempotencyRecord
from .base import BoundedPaginator
from .databases import DatabaseFilter, databases
from .links import page_url


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
    """The page of a record, in whichever database it is; empty as in ``page_url``."""
    address = page_url(site, "idempotencyrecord", "change", record.pk)
    database = record._state.db
    if not address or database == databases()[0]:
        return address
    filters = urlencode({DatabaseFilter.parameter_name: database})
    return f"{address}?{urlencode({'_changelist_filters': filters})}"
