"""What both decorators ask of a request: its method, its key and its body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from django.conf import settings
from django.http import HttpRequest
from django.http.request import RawPostDataException

from ..keys import Key
from .wrapped import unwrapped

OnDisconnect: TypeAlias = Literal["finish", "cancel"]

LARGEST = 2_621_440
"""Bytes of a body that is read before its lock is taken, in a project that sets no limit."""

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""``methods="unsafe"`` means all other methods, as Django's CSRF protection does.

A method that nobody here has heard of may change something.
"""


def method_test(methods: Sequence[str]) -> Callable[[str | None], bool]:
    """Whether the option ``methods`` means the method of a request.

    Raises:
        TypeError: It is neither ``"unsafe"`` nor names in capitals.
    """
    if methods == "unsafe":
        return lambda method: method not in SAFE
    # A string is a sequence of strings, too, so exclude it first. Copy, because an iterator can be
    # read only once.
    names = frozenset() if isinstance(methods, str) else frozenset(methods)
    if not names or not all(isinstance(name, str) and name.isupper() for name in names):
        raise TypeError(
            f"methods is {methods!r}; it takes names in capitals, such as ['POST'], or 'unsafe'"
        )
    return names.__contains__


def check_on_disconnect(value: object, decorator: str) -> None:
    if value not in ("finish", "cancel"):
        raise ValueError(f"on_disconnect is {value!r}; {decorator} takes 'finish' or 'cancel'")


def every_method(method: str | None) -> bool:
    return True


def of_list(*args: Any) -> Key:
    """The key of a list of names."""
    # Loaded here, because most keys are templates.
    from .arguments import FieldsDigest

    return FieldsDigest(*args)


def sends_body(request: HttpRequest) -> bool:
    """Whether the client may still be sending a body that fits into memory.

    Under ASGI, Django calls no view before it has the body. An upload is left to the view, whose
    handlers must be set before it is read.
    """
    whole = unwrapped(request)
    if not hasattr(whole, "environ") or (whole.content_type or "").startswith("multipart/"):
        return False
    try:
        length = int(whole.META.get("CONTENT_LENGTH") or 0)
    except ValueError:
        return False
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return 0 < length <= (LARGEST if limit is None else limit)


def explain_upload(error: BaseException) -> None:
    """Let Django's error about upload handlers that are set too late say where to set them."""
    if isinstance(error, AttributeError) and "after the upload has been processed" in str(error):
        cure = (
            "@idempotent_view has read it, to compare it with that of an earlier request. Set the "
            "handlers in a view or decorator above @idempotent_view, or in a middleware"
        )
        error.args = (f"{error} {cure}",)


def read_body(request: HttpRequest) -> None:
    """Read the body, which the view then finds in memory, so that a slow client holds no lock.

    Raises:
        UnreadablePostError: The client has broken off.
    """
    with suppress(RawPostDataException):
        # Something has read it as a stream already; then it is the view's.
        _ = unwrapped(request).body
