"""Requests as fingerprints; responses and errors as text that can be stored."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase

__all__ = ["decode", "describe", "encode", "fingerprint", "is_final"]

TRANSIENT = frozenset({401, 403, 408, 409, 423, 425, 429})
"""Statuses of answers that may be different later, although the request is the same."""
MOST_BYTES = 1_000_000
"""A larger body is not stored."""
LONGEST_ERROR = 1000


def fingerprint(request: HttpRequest) -> str:
    """A digest of method, path, query and body."""
    made = hashlib.sha256()
    for part in (request.method or "", request.get_full_path(), *_body(request)):
        data = part if isinstance(part, bytes) else part.encode()
        # The length distinguishes ("a", "bc") from ("ab", "c").
        made.update(len(data).to_bytes(8, "big") + data)
    return made.hexdigest()


def _body(request: HttpRequest) -> Iterator[str | bytes]:
    # REST framework passes its views a wrapper around Django's request.
    request = getattr(request, "_request", request)
    if request.method != "POST" or request.content_type != "multipart/form-data":
        # Raises if something has read the body as a stream: without it, requests with the same
        # key cannot be compared.
        yield request.body
        return
    # By its parts, because a client chooses another boundary each time; and the whole body may be
    # larger than Django reads into memory.
    for name, values in sorted(request.POST.lists()):
        yield from (name, *values)
    for name, files in sorted(request.FILES.lists()):
        for file in files:
            yield from (name, file.name or "")
            yield from file.chunks()
            file.seek(0)


def is_final(response: HttpResponseBase) -> bool:
    """Whether the answer is stored; if it is not, the same key may be tried again."""
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


def describe(error: BaseException) -> str:
    """The error as text that every database can store; never raises."""
    text = type(error).__name__
    with contextlib.suppress(Exception):
        text = f"{text}: {error}"
    # PostgreSQL stores no NUL, and no database stores a lone surrogate.
    text = text[:LONGEST_ERROR].replace("\0", "\\x00")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
