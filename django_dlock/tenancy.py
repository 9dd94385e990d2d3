"""The scope of the tenant: what ``DLOCK_SCOPE`` returns, and how it is part of names.

Locks and records of two tenants never meet, because the tenant's scope stands in front of the
names of locks and of the scopes of records, as in ``[acme]order:1``. It ends with the first
``]``, which no tenant's scope contains; and without an active tenant, no name begins with ``[``
while the setting is set. So no other scope and name produce the same text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .text.names import MAX_NAME, fit, plain

__all__ = [
    "current",
    "full",
    "function",
    "is_full",
    "is_set",
    "is_valid",
    "of_message",
    "override",
    "prefixed",
    "read",
    "reset",
    "split",
]

LONGEST = 100
"""Characters of a tenant's scope, so that it is never cut from a name."""
OPENS, CLOSES = "[", "]"

_VALID = re.compile("[^\\[\\]\x00-\x1f\x7f-\x9f\ud800-\udfff]*")


def _first() -> str:
    """Read the setting when it is first needed; from then on, ``function`` is the project's."""
    global function
    function = read()
    return "" if function is None else function()


function: Callable[[], str] | None = _first
"""The project's function; ``None`` if ``DLOCK_SCOPE`` is not set, so that there are no scopes."""

_of_message: ContextVar[str] = ContextVar("dlock_scope_of_message", default="")
_override: ContextVar[str | None] = ContextVar("dlock_scope_override", default=None)


def read() -> Callable[[], str] | None:
    """The function that ``DLOCK_SCOPE`` names; ``None`` if it is not set.

    Raises:
        ImproperlyConfigured: It is not the path of a plain function, or cannot be imported.
    """
    # Loaded here, because names are made without settings, too.
    from django.conf import settings
    from django.core.exceptions import ImproperlyConfigured
    from django.utils.module_loading import import_string

    from .text.redaction import redacted

    path: Any = getattr(settings, "DLOCK_SCOPE", None)
    if path is None:
        return None
    if not isinstance(path, str):
        raise ImproperlyConfigured(
            f"DLOCK_SCOPE is {redacted(path)}; it takes the dotted path of a function, such as "
            "'shop.tenants.scope'"
        )
    try:
        found: Any = import_string(path)
    except Exception as error:
        raise ImproperlyConfigured(f"DLOCK_SCOPE: cannot import {path!r}: {error}") from error
    if not callable(found) or isinstance(found, type) or inspect.iscoroutinefunction(found):
        raise ImproperlyConfigured(
            f"DLOCK_SCOPE: {path!r} is {found!r}; it takes a plain function without arguments "
            "that returns a string"
        )
    function: Callable[[], str] = found
    return function


def is_set() -> bool:
    """Whether ``DLOCK_SCOPE`` is set, as far as it has been read."""
    return function is not None


def reset() -> None:
    """Read the setting again, because it has changed."""
    global function
    function = _first


def is_valid(scope: object) -> bool:
    """Whether a tenant's scope may be this; the empty string is no tenant."""
    return isinstance(scope, str) and len(scope) <= LONGEST and bool(_VALID.fullmatch(scope))


def current() -> str:
    """The scope of the active tenant; empty if there is none, or if ``DLOCK_SCOPE`` is not set.

    If the project's function knows of no tenant, that of the message which is being run counts.

    Raises:
        ImproperlyConfigured: ``DLOCK_SCOPE`` is wrong.
        TypeError, ValueError: The function has returned something else.
        Exception: Whatever the function raises; nothing is locked or recorded without a scope
            because of an error.
    """
    if function is None:
        return ""
    if (given := _override.get()) is not None:
        return given
    found: object = function()
    if not isinstance(found, str):
        raise TypeError(
            f"The function of DLOCK_SCOPE returned {found!r}; it must return a string, empty if no "
            "tenant is active"
        )
    if not is_valid(found):
        raise ValueError(
            f"The function of DLOCK_SCOPE returned {found[: LONGEST + 1]!r}; a tenant's scope has "
            f"at most {LONGEST} characters, and no square brackets, control characters or lone "
            "surrogates"
        )
    found = plain(found)
    # The first call may have found that the setting is not set, here but for the publisher.
    return found or (_of_message.get() if is_set() else "")


@contextmanager
def of_message(scope: str) -> Iterator[None]:
    """Let this scope count where the project's function knows of no tenant."""
    if not scope:
        yield
        return
    token = _of_message.set(scope)
    try:
        yield
    finally:
        _of_message.reset(token)


@contextmanager
def override(scope: str) -> Iterator[None]:
    """Let this scope count, whatever the project's function says; also the empty one."""
    token = _override.set(scope)
    try:
        yield
    finally:
        _override.reset(token)


def full(text: str) -> str:
    """The full name of a lock, or the full scope of a record, for the active tenant.

    Raises:
        ValueError: The text begins like a full one, while ``DLOCK_SCOPE`` is set.
        Exception: See ``current``.
    """
    text = plain(text)
    if function is None:
        return text
    scope = current()
    # Asked again, because the first call may have found that the setting is not set.
    if function is not None and text.startswith(OPENS):
        raise ValueError(
            f"{text[:80]!r} begins with {OPENS!r}: while DLOCK_SCOPE is set, only the full names "
            "that lists show may begin with it. Activate the tenant, and give the name without "
            "its scope"
        )
    return prefixed(scope, text)


def prefixed(scope: str, text: str) -> str:
    """As ``full``, for this tenant's scope instead of the active one; at most 255 characters."""
    return fit(f"{OPENS}{scope}{CLOSES}{text}", MAX_NAME) if scope else text


def is_full(text: str) -> bool:
    """Whether a tenant's scope is in front of the text already."""
    return bool(split(text)[0])


def split(text: str) -> tuple[str, str]:
    """The tenant's scope in a full name, or empty; and the rest, which may end in a digest."""
    if function is None or not text.startswith(OPENS):
        return "", text
    scope, found, rest = text[len(OPENS) :].partition(CLOSES)
    return (scope, rest) if found else ("", text)
