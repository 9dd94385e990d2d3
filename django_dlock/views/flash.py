"""Messages of ``django.contrib.messages`` that a view has added: a repeated answer adds them again.

A browser that sends a form twice shows the answer to the second request only. The first one may
have had the message in a cookie, which the browser has then not kept.
"""

from __future__ import annotations

from typing import Any

from django.contrib.messages import get_messages
from django.contrib.messages.storage.session import SessionStorage
from django.http import HttpRequest
from django.utils.safestring import SafeData, mark_safe

from ..log import logger
from ..text.request_path import path_of


def added(request: HttpRequest) -> list[list[Any]]:
    """Level, text, tags and whether the text is HTML of each message that waits for a page.

    Without those of earlier requests, which are for the user of this one, and were no part of it;
    a client may be several users.
    """
    storage: Any = get_messages(request)
    # Not by iterating, which also reads the earlier ones. What a page has shown is not in it.
    queued = getattr(storage, "_queued_messages", None)
    if queued is None:
        if storage:
            logger.warning(
                "%s: %s does not tell which messages are new, so a repeated answer has none",
                path_of(request),
                type(storage).__name__,
            )
        return []
    return [
        [one.level, str(one.message), str(one.extra_tags or ""), isinstance(one.message, SafeData)]
        for one in queued
    ]


def add_again(request: HttpRequest, messages: list[list[Any]]) -> None:
    """Add messages to a request, except for those that already wait for its next page.

    What the first request has left in the session is there for the next page; to write to the
    session as well could undo what that request has changed in it.
    """
    storage: Any = get_messages(request)
    # A project may have removed the app meanwhile.
    if not messages or not hasattr(storage, "add") or isinstance(storage, SessionStorage):
        return
    waiting = {(one.level, str(one.message)) for one in _read(storage)}
    for level, text, tags, is_html in messages:
        if (level, text) not in waiting:
            storage.add(level, mark_safe(text) if is_html else text, tags)  # noqa: S308


def _read(storage: Any) -> list[Any]:
    used, messages = storage.used, list(storage)
    # They were not shown, only read.
    storage.used = used
    for one in messages:
        # Django stores those that were read as they are, and cannot store a lazy translation.
        one.message = str(one.message)
        one.extra_tags = one.extra_tags and str(one.extra_tags)
    return messages
