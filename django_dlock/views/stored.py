"""Requests as fingerprints; responses and errors as text that can be stored."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from http.cookies import CookieError, Morsel
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.http.request import RawPostDataException

from ..text.names import REFUSED
from ..text.printable import storable
from .body import FORMS, digest_of_file
from .wrapped import unwrapped

TRANSIENT = frozenset({401, 403, 408, 409, 423, 425, 429})
"""Statuses of answers that may be different later, although the request is the same."""
MOST_BYTES = 1_000_000
"""A larger body is not stored."""
LONGEST_ERROR = 1000
NOT_RENDERED = "not rendered"
"""Stored with the effects of a view whose page is rendered after them, until that has happened."""

_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


class NotKept(Exception):
    """There is no answer to repeat; the text says why, and does not quote it."""


class Damaged(NotKept):
    """A stored answer was erased, or is not one that ``encode`` has made."""


def fingerprint(request: HttpRequest) -> str:
    """A digest of method, path, query and body."""
    made = hashlib.sha256()
    for part in (request.method or "", request.get_full_path(), *_body(request)):
        if part is None:
            # No part has this length.
            made.update(b"\xff" * 8)
            continue
        # A lone surrogate is possible in the path and in a form.
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        # The length distinguishes ("a", "bc") from ("ab", "c").
        made.update(len(data).to_bytes(8, "big") + data)
    return made.hexdigest()


def _body(request: HttpRequest) -> Iterator[str | bytes | None]:
    whole = unwrapped(request)
    if whole.method != "POST" or whole.content_type != "multipart/form-data":
        try:
            body = whole.body
        except RawPostDataException:
            # Something has read it as a stream. If that was REST framework, it has kept the form.
            if not (whole.content_type in FORMS and hasattr(whole, "_files")):
                yield from (None, None, _of_parsed(request))
                return
        else:
            yield body
            return
    elif whole._read_started and not hasattr(whole, "_body") and not hasattr(whole, "_files"):
        # Django would find no field in it.
        yield from (None, None, _of_parsed(request))
        return
    # By its parts, because a client chooses another boundary each time; and the whole body may be
    # larger than Django reads into memory.
    fields, files = sorted(whole.POST.lists()), sorted(whole.FILES.lists())
    if not files and all(len(values) == 1 for _, values in fields):
        for name, values in fields:
            yield from (name, *values)
        return
    # The counts distinguish ``a=1&a=b&a=2`` from ``a=1&b=2``, and a file from two fields. Nothing
    # else has a part of this kind, so that what has only single values, above, is never the same.
    yield None
    for name, values in fields:
        yield from (name, str(len(values)), *values)
    yield None
    for name, uploads in files:
        yield from (name, str(len(uploads)))
        for file in uploads:
            yield from (file.name or "", digest_of_file(file))


def _of_parsed(request: Any) -> str:
    """What REST framework has parsed, where the bytes are gone.

    Raises:
        RawPostDataException: There is nothing that could be compared.
    """
    # Django's request has no such attribute. Here the parser has run already.
    data = getattr(request, "data", None)
    if data is not None:
        with contextlib.suppress(RecursionError, TypeError, ValueError):
            return json.dumps(data, sort_keys=True)
    raise RawPostDataException(
        "@idempotent_view compares the bodies of requests, but something has read this one as a "
        "stream before, such as a permission that asks for request.data, and has not made JSON of "
        "it: put @idempotent_view above that, or let a middleware read request.body first"
    )


def is_final(response: HttpResponseBase) -> bool:
    """Whether the answer is stored; if it is not, the same key may be tried again."""
    return response.status_code < 500 and response.status_code not in TRANSIENT


def encode(
    response: HttpResponseBase, *, cookies: bool, messages: list[list[Any]] | None = None
) -> str:
    """The response as text; what middleware adds later is not part of it.

    Args:
        cookies: Whether cookies are part of it.
        messages: What ``flash.added`` returns.

    Raises:
        NotKept: It is a streamed response, has more than a million bytes, or cannot be read.
    """
    try:
        return _encoded(response, cookies, messages)
    except NotKept:
        raise
    except Exception as error:
        raise NotKept(f"reading it raised {type(error).__name__}") from error


def _encoded(response: HttpResponseBase, cookies: bool, messages: list[list[Any]] | None) -> str:
    if not isinstance(response, HttpResponse):
        raise NotKept(f"it is streamed ({type(response).__name__})")
    if len(response.content) > MOST_BYTES:
        raise NotKept(f"it has {len(response.content)} bytes; at most {MOST_BYTES} are stored")
    headers = [item for item in response.items() if cookies or not _is_cookie(item[0])]
    morsels = response.cookies.values() if cookies else ()
    stored: dict[str, Any] = {
        "status": response.status_code,
        "reason": response.reason_phrase,
        "headers": headers,
        "cookies": [[morsel.key, morsel.coded_value, _attributes(morsel)] for morsel in morsels],
        "body": base64.b64encode(response.content).decode(),
    }
    if messages:
        stored["messages"] = messages
    return json.dumps(stored)


def encode_without_answer() -> str:
    """What is stored in place of an answer that cannot be."""
    return json.dumps({"not_kept": True})


def _is_cookie(header: str) -> bool:
    return header.lower() == "set-cookie"


def decode(text: str, *, cookies: bool) -> HttpResponse:
    """The response that ``encode`` was given, marked as a repeated one.

    Args:
        cookies: Whether to set its cookies, if they were stored.

    Raises:
        NotKept: It could not be stored.
        Damaged: Somebody else has written it, or it was erased.
    """
    if text == NOT_RENDERED:
        raise Damaged("the page was not rendered")
    if text == encode_without_answer():
        raise NotKept("it could not be stored")
    try:
        return _decoded(json.loads(text), cookies)
    except (CookieError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Without the error itself, which may quote the answer.
        raise Damaged(type(error).__name__) from None


def _decoded(stored: Any, cookies: bool) -> HttpResponse:
    status, reason = stored["status"], stored["reason"]
    if type(status) is not int or not isinstance(reason, str) or REFUSED.search(reason):
        raise Damaged("status or reason")
    body = base64.b64decode(stored["body"], validate=True)
    response = HttpResponse(body, status=status, reason=reason)
    del response["Content-Type"]
    for name, value in stored["headers"]:
        # Django refuses line feeds, and no other character that ends a name.
        if not _HEADER_NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise Damaged("headers")
        if cookies or not _is_cookie(name):
            response[name] = value
    for cookie in stored["cookies"] if cookies else ():
        if isinstance(cookie, str):
            # An earlier version has stored it.
            response.cookies.load(cookie)
        else:
            _set_cookie(response, *cookie)
    response["Idempotent-Replayed"] = "true"
    return response


def messages_of(text: str) -> list[list[Any]]:
    """The messages that ``encode`` was given; none if somebody else has changed them."""
    found = json.loads(text).get("messages", [])
    return [one for one in found if _is_message(one)] if isinstance(found, list) else []


def _is_message(one: Any) -> bool:
    return isinstance(one, list) and [type(part) for part in one] == [int, str, str, bool]


def _attributes(cookie: Morsel[str]) -> dict[str, str | bool]:
    return {
        name: value if value is True else str(value)
        for name, value in cookie.items()
        if value != ""
    }


def _set_cookie(response: HttpResponse, name: Any, coded: Any, attributes: Any) -> None:
    """Set a cookie with all that it had.

    Not by ``load()``, whose parser knows less than browsers do: it stops at a space in a path.
    """
    given = dict(attributes)
    for text in (name, coded, *(value for value in given.values() if value is not True)):
        if not isinstance(text, str) or REFUSED.search(text):
            raise Damaged("cookies")
    cookie: Morsel[str] = Morsel()
    cookie.set(name, response.cookies.value_decode(coded)[0], coded)
    cookie.update(given)
    response.cookies[name] = cookie


def describe(error: BaseException) -> str:
    """The error as text that every database can store; never raises."""
    text = type(error).__name__
    with contextlib.suppress(Exception):
        text = f"{text}: {error}"
    return storable(text[:LONGEST_ERROR])
