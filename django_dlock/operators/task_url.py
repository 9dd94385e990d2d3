"""Reads ``DLOCK_ADMIN``: where a task is shown, for instance in Flower."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from ..text.names import plain
from ..text.redaction import redacted

KEYS = ("TASK_URL",)
EXAMPLE = "https://flower.example.com/task/{task_id}"


def read() -> str | None:
    """The template of a task's address; ``None`` if the settings have none.

    Raises:
        ImproperlyConfigured: Something is wrong; the message names it and what is allowed.
    """
    value: Any = getattr(settings, "DLOCK_ADMIN", None)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ImproperlyConfigured(
            f"DLOCK_ADMIN is {redacted(value)}; it takes a dict, such as "
            f"{{'TASK_URL': {EXAMPLE!r}}}"
        )
    unknown = sorted(map(str, set(value) - set(KEYS)))
    if unknown:
        raise ImproperlyConfigured(f"DLOCK_ADMIN has {redacted(unknown)}; it takes {list(KEYS)}")
    url = value.get("TASK_URL")
    url = plain(url) if isinstance(url, str) else url
    if url is not None and not _is_template(url):
        raise ImproperlyConfigured(
            f"DLOCK_ADMIN['TASK_URL'] is {redacted(url)}; it takes an http or https URL with "
            f"{{task_id}} "
            f"after the host, such as {EXAMPLE!r}"
        )
    return url


def url_of_task(task_id: object) -> str | None:
    """Where this task is shown; ``None`` without an id or without a valid setting."""
    try:
        template = read()
    except ImproperlyConfigured:
        # A system check reports it. The page must show its locks nevertheless.
        return None
    if template is None or not task_id or not isinstance(task_id, str):
        return None
    try:
        return template.replace("{task_id}", quote(task_id, safe=""))
    except UnicodeEncodeError:
        # A lone surrogate, which somebody else has written: no address can contain it.
        return None


def _is_template(url: Any) -> bool:
    if not isinstance(url, str):
        return False
    try:
        fields = [field for _, field, *_ in string.Formatter().parse(url) if field is not None]
        parts = urlsplit(url)
        return (
            set(fields) == {"task_id"}
            # A format, such as {task_id!r}, would not be found where the id is put in.
            and url.count("{task_id}") == len(fields)
            and parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and "{" not in parts.netloc
        )
    except ValueError:
        return False
