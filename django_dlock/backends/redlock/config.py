"""The settings of Redlock, and what is wrong with them; does not import the client of Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..base import AliasOptions, BackendOptions, Problem
from ..shared.options import arguments, fraction, longest_ttl, option, or_none

__all__ = ["RedlockOptions", "address"]

FEWEST = 3
SCHEMES = ("redis", "rediss", "unix")
PORT = 6379


@dataclass(frozen=True, kw_only=True)
class RedlockOptions(BackendOptions):
    """The options of the backend.

    A node that has lost its data grants nothing for ``max_ttl``.
    """

    connects_by = ("LOCATION",)
    connection = (
        "LOCATION lists the URLs of 3 or 5 Redis servers that share no machine and replicate "
        "nothing."
    )

    max_ttl: float = longest_ttl()
    clock_drift: float = option(
        fraction(below=0.5),
        "the fraction of a TTL by which the clocks of two nodes may drift apart",
        0.01,
    )
    connection_kwargs: Mapping[str, Any] | None = option(
        or_none(arguments()), "further arguments for redis-py's connections", None
    )

    def check(self, alias: AliasOptions) -> list[Problem]:
        """E006, unless ``LOCATION`` lists an odd number of different servers."""
        place, location = f"DLOCKS[{alias.alias!r}]['LOCATION']", alias.location
        if not isinstance(location, tuple):
            message = f"{place} is not a list of URLs, one for each of the servers."
        elif len(location) < FEWEST or len(location) % 2 == 0:
            message = (
                f"{place} lists {len(location)} servers. An odd number, at least {FEWEST}, is "
                "needed: an even one tolerates no more failures than one server less."
            )
        else:
            return [*_wrong_urls(place, location), *_duplicates(place, location)]
        return [Problem("E006", message, self.connection)]


def _wrong_urls(place: str, location: tuple[str, ...]) -> list[Problem]:
    found: list[Problem] = []
    for number, url in enumerate(location, 1):
        if not address(url):
            # The URL may contain a password, so it is not repeated.
            message = f"{place}, URL number {number}, is not the URL of a Redis."
            hint = "It is like redis://host:6379/0, rediss://host:6379/0 or unix:///path."
            found.append(Problem("E006", message, hint))
    return found


def _duplicates(place: str, location: tuple[str, ...]) -> list[Problem]:
    addresses = [address(url) for url in location]
    twice = sorted({one for one in addresses if one and addresses.count(one) > 1})
    if not twice:
        return []
    message = (
        f"{place} lists the server {twice[0]} more than once: a majority of one "
        "server's votes is no majority of servers."
    )
    hint = "List each server once; another database of the same server is the same server."
    return [Problem("E006", message, hint)]


def address(url: str) -> str:
    """The server in a URL, without the database and the password; empty if it names none."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
    except ValueError:
        return ""
    if parts.scheme not in SCHEMES:
        return ""
    if parts.scheme == "unix":
        return parts.path
    # Without a host, redis-py would take localhost: another server on each machine.
    if not parts.hostname:
        return ""
    return f"{'127.0.0.1' if parts.hostname == 'localhost' else parts.hostname}:{port}"
