"""What both decorators ask of a request: its method, and whether its visitor has to log in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.http import HttpRequest, HttpResponseBase

from ..keys import MissingValue
from . import refusals
from .signature import name_of

__all__ = ["every_method", "login_or_error", "method_test"]

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


def every_method(method: str | None) -> bool:
    return True


def login_or_error(
    missing: MissingValue, view: Callable[..., Any], request: HttpRequest, kwargs: Mapping[str, Any]
) -> HttpResponseBase:
    """The answer to a request in which a field has no value: a redirect to the login page, or 403.

    Raises:
        MissingValue: A login would add no value.
    """
    if missing.of_user and refusals.is_anonymous(request):
        return refusals.login_required(request)
    text = f"{missing}. The view {name_of(view)} was called with {', '.join(['request', *kwargs])}"
    raise MissingValue(text, of_user=missing.of_user) from missing
