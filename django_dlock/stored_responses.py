"""Requests as fingerprints, and responses as text that can be stored and sent again."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.http.request import RawPostDataException

__all__ = ["decode", "encode", "fingerprint", "is_final"]

TRANSIENT = frozenset({401, 403, 408, 409, 423, 425, 429})
"""Statuses of answers that may be others later, although the request stays the same."""
MOST_BYTES = 1_000_000
"""A larger body is not stored."""


def fingerprint(request: HttpRequest) -> str:
    """A digest of method, path, query and body."""
    made = hashlib.sha256()
    for part in (request.method or "", request.get_full_path(), *_body(request)):
        data = part if isinstance(part, bytes) else part.encode()
        # The length distinguishes ("a", "bc") from ("ab", "c").
        made.update(len(data).to_bytes(8, "big") + data)
    return made.hexdigest()


def _body(request: HttpRequest) -> Iterator[str | bytes]:
    try:
        yield request.body
    except RawPostDataException:
        # A form with files that something has read already, such as the CSRF middleware.
        for name, values in sorted(request.POST.lists()):
            yield from (name, *(str(value) for value in values))
        for name, files in sorted(request.FILES.lists()):
            for file in files:
                yield from (name, file.name or "")
                yield from file.chunks()
                file.seek(0)


def is_final(response: HttpResponseBase) -> bool:
    """Whether the answer is stored. After another one, the same key may be tried again."""
    return response.status_code < 500 and response.status_code not in TRANSIENT


def encode(response: HttpResponseBase) -> str:
    """The response as text; what middleware adds later is not part of it.

    Raises:
        TypeError: It is a streamed response.
        ValueError: Its body has more than a million bytes.
    """
    if not isinstance(response, HttpResponse):
        raise TypeError(
            f"@idempotent_view cannot store a streamed response ({type(response).__name__}): "
            "return an HttpResponse"
        )
    if len(response.content) > MOST_BYTES:
        raise ValueError(
            f"@idempotent_view: the response has {len(response.content)} bytes; at most "
            f"{MOST_BYTES} are stored. Return a reference, such as a URL, instead"
        )
    stored: dict[str, Any] = {
        "status": response.status_code,
        "reason": response.reason_phrase,
        "headers": list(response.items()),
        "cookies": [morsel.OutputString() for morsel in response.cookies.values()],
        "body": base64.b64encode(response.content).decode(),
    }
    return json.dumps(stored)


def decode(text: str) -> HttpResponse:
    """The response that ``encode`` was given, marked as a repeated one."""
    stored = json.loads(text)
    response = HttpResponse(
        base64.b64decode(stored["body"]), status=stored["status"], reason=stored["reason"]
    )
    del response["Content-Type"]
    for name, value in stored["headers"]:
        response[name] = value
    for cookie in stored["cookies"]:
        response.cookies.load(cookie)
    response["Idempotent-Replayed"] = "true"
    return response
