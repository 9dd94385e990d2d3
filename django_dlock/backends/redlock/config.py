"""The settings of Redlock, and what is wrong with them; does not import the client of Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..base import AliasOptions, BackendOptions, Problem
from ..redis.config import NO_HOST, wrong_url
from ..shared.options import arguments, fraction, longest_ttl, option, or_none

FEWEST = 3
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
            return self._wrong_urls(place, location) or self._duplicates(place, location)
        return [Problem("E006", message, self.connection)]

    @staticmethod
    def _wrong_urls(place: str, location: tuple[str, ...]) -> list[Problem]:
        return [
            Problem("E006", f"{place}, URL number {number}, {wrong[0]}", wrong[1])
            for number, url in enumerate(location, 1)
            if (wrong := wrong_url(url) or (None if address(url) else NO_HOST))
        ]

    @staticmethod
    def _duplicates(place: str, location: tuple[str, ...]) -> list[Problem]:
        addresses = [address(url) for url in location]
        twice = sorted({one for one in addresses if addresses.count(one) > 1})
        message = (
            f"{place} lists the server {{}} more than once: a majority of one server's votes is no "
            "majority of servers."
        )
        hint = "List each server once; another database of the same server is the same server."
        return [Problem("E006", message.format(one), hint) for one in twice]


def address(url: str) -> str:
    """The server in a right URL, without the database and the password; empty without a host."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or not parts.hostname:
        return parts.path if parts.scheme == "unix" else ""
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return f"{host}:{parts.port or PORT}"
