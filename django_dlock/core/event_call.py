"""One call of ``event_queue``: what it is named, and the connections that it may leave open."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple


class Call(NamedTuple):
    """A call to be made.

    Attributes:
        function: Named if the call takes too long or is not made; a function, or its description.
        key: Calls with the same key never overtake each other.
    """

    make: Callable[[], object]
    function: object
    key: Hashable


def name_of(function: object) -> str:
    """What the log calls a function."""
    if isinstance(function, str):
        return function
    while isinstance(function, functools.partial):
        function = function.func
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{getattr(kind, '__qualname__', '?')}"


def key_of(function: object) -> Hashable:
    """Equal for all functions that are made from one ``def`` or ``lambda``."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return id(getattr(function, "__code__", function))


def close_old_connections() -> None:
    """Close connections of this thread that are broken or too old, as after a request."""
    # Here, because whoever imports ``Lock`` may not need a database.
    from django.db import close_old_connections

    close_old_connections()


def close_all_connections() -> None:
    """Close what ``CONN_MAX_AGE`` keeps open, too."""
    from django.db import connections

    connections.close_all()
