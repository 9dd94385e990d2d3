"""Finds a kind of lock by its name, among those of all stores."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .database_peers import DATABASE_KINDS
from .peers import DIRECT, KINDS, TOKEN, Handle, Kind, Route, client
from .store_peers import STORE_KINDS


def kind(name: str) -> Kind:
    return next(kind for kind in (*KINDS, *DATABASE_KINDS, *STORE_KINDS) if kind.name == name)


@functools.cache
def maker(name: str, route: Route) -> Callable[[str], Handle]:
    """Makes handles of a kind in this process; connects at first use."""
    return kind(name).make(route)


@functools.cache
def cycling(name: str, route: Route) -> Callable[[str], None]:
    """Acquires and releases a name in this process; connects at first use."""
    return kind(name).cycling(route)


def prime(kind: Kind, name: str) -> None:
    """Prepare a name for its first acquire, which needs a token."""
    if kind.name == TOKEN:
        with client(DIRECT) as asking:
            asking.rpush(name, "token")
