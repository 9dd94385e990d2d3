"""Links between a lock, its task, its idempotency record and its events."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from django.contrib import admin
from django.contrib.admin.utils import quote as quote_id
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from .base import ReadOnlyAdmin, breakable


class LinkedToLock(ReadOnlyAdmin):
    """Objects that name a lock; their pages have a field ``lock`` with a link to it.

    Attributes:
        lock_fields: The fields of the lock's alias and name.
    """

    lock_fields: tuple[str, str]

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        obj: Any = super().get_object(request, object_id, from_field)
        if obj is not None:
            # Set here, because columns do not get the request.
            alias, name = (getattr(obj, field) for field in self.lock_fields)
            obj.lock_link = lock_link(request, self.admin_site.name, alias, name)
        return obj

    @admin.display(description=_("lock"))
    def lock(self, obj: Any) -> str | None:
        return obj.lock_link or None


def id_of(alias: str, name: str) -> str:
    """The admin's id of a held lock: alias and name, because two aliases may have the same name.

    The alias is quoted, so that the first slash always ends it.
    """
    return f"{quote(alias, safe='')}/{name}"


def page_url(site: str, model: str, page: str, *ids: int | str) -> str:
    """The address of a page in the admin site of this name; empty if it has no such page."""
    args = [quote_id(one) for one in ids]
    try:
        return reverse(f"admin:django_dlock_{model}_{page}", args=args, current_app=site)
    except NoReverseMatch:
        # A project may register only some of the models in a site of its own.
        return ""


def lock_url(site: str, alias: str, name: str) -> str:
    """The page of a lock; nobody need hold it."""
    return page_url(site, "heldlock", "change", id_of(alias, name))


def lock_link(request: HttpRequest, site: str, alias: str, name: str) -> SafeString:
    """The name of a lock; for those who may see held locks, it is a link to the lock's page."""
    text = breakable(name) if name else SafeString()
    if not (alias and name and request.user.has_perm("django_dlock.view_heldlock")):
        return text
    return linked(lock_url(site, alias, name), text)


def linked(url: str, text: SafeString) -> SafeString:
    """A link; without an address, just the text."""
    return format_html('<a href="{}">{}</a>', url, text) if url else text


def events_url(site: str, alias: str, name: str) -> str:
    """The list of the events of one lock; empty as in ``page_url``."""
    url = page_url(site, "lockevent", "changelist")
    return url and f"{url}?{urlencode({'alias': alias, 'name': name})}"


def task_link(address: str, text: object) -> SafeString:
    """A link to the page of a task; that site is not told from which page the visitor comes."""
    return format_html('<a href="{}" rel="noreferrer">{}</a>', address, text)
