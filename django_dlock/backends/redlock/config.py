"""Checks an alias's settings for Redlock, without importing the client of Redis."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from django.views.decorators.debug import sensitive_variables

from ... import clock
from ...exceptions import InvalidLockBackend
from ...redaction import redacted
from ..base import AliasOptions, Problem

__all__ = ["OPTIONS", "RedlockOptions", "address", "problems"]

OPTIONS = ("clock_drift", "connection_kwargs", "max_ttl")
"""Keys of ``OPTIONS``, in addition to ``command_timeout`` and ``outage_patience``."""

CLOCK_DRIFT = 0.01
FEWEST = 3
SCHEMES = ("redis", "rediss", "unix")
PORT = 6379


class RedlockOptions(NamedTuple):
    """The options of the backend, checked.

    Attributes:
        max_ttl: The longest TTL that is granted, in seconds. A node that has lost its data grants
            nothing for this long.
        clock_drift: The fraction of a TTL by which the clocks of two nodes may drift apart.
    """

    max_ttl: float
    clock_drift: float

    @classmethod
    @sensitive_variables("clock_drift", "key", "max_ttl")
    def read(cls, options: AliasOptions) -> RedlockOptions:
        """Read ``OPTIONS``.

        Raises:
            InvalidLockBackend: It has an unknown key or a bad value.
        """
        place = f"DLOCKS[{options.alias!r}]['OPTIONS']"
        for key in options.options:
            if key not in OPTIONS:
                raise InvalidLockBackend(
                    f"{place} has the unknown key {redacted(key)}; "
                    f"known: {['command_timeout', 'outage_patience', *OPTIONS]}"
                )
        max_ttl = options.options.get("max_ttl", options.ttl)
        if not (_is_number(max_ttl) and max_ttl >= options.ttl):
            raise InvalidLockBackend(
                f"{place}['max_ttl'] is {redacted(max_ttl)}; it takes seconds, at least the "
                f"alias's TTL of {options.ttl:g}"
            )
        clock_drift = options.options.get("clock_drift", CLOCK_DRIFT)
        if not (_is_number(clock_drift) and 0 <= clock_drift < 0.5):
            raise InvalidLockBackend(
                f"{place}['clock_drift'] is {redacted(clock_drift)}; it takes a fraction of the "
                "TTL, from 0 to less than 0.5"
            )
        return cls(float(max_ttl), float(clock_drift))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= clock.LONGEST


def problems(options: AliasOptions) -> list[Problem]:
    """E006, unless ``LOCATION`` lists an odd number of different servers."""
    place, location = f"DLOCKS[{options.alias!r}]", options.location
    hint = "List the URLs of 3 or 5 Redis servers that share no machine and replicate nothing."
    if options.cache is not None:
        message = f"{place} has 'CACHE', but Redlock needs several servers that are no cache."
        return [Problem("E006", message, hint)]
    if not isinstance(location, tuple):
        message = f"{place}['LOCATION'] is not a list of URLs, one for each of the servers."
        return [Problem("E006", message, hint)]
    if len(location) < FEWEST or len(location) % 2 == 0:
        message = (
            f"{place}['LOCATION'] lists {len(location)} servers. An odd number, at least "
            f"{FEWEST}, is needed: an even one tolerates no more failures than one server less."
        )
        return [Problem("E006", message, hint)]
    return [*_wrong_urls(place, location), *_duplicates(place, location)]


def _wrong_urls(place: str, location: tuple[str, ...]) -> list[Problem]:
    found: list[Problem] = []
    for number, url in enumerate(location, 1):
        if not address(url):
            # The URL may contain a password, so it is not repeated.
            message = f"{place}['LOCATION'], URL number {number}, is not the URL of a Redis."
            hint = "It is like redis://host:6379/0, rediss://host:6379/0 or unix:///path."
            found.append(Problem("E006", message, hint))
    return found


def _duplicates(place: str, location: tuple[str, ...]) -> list[Problem]:
    addresses = [address(url) for url in location]
    twice = sorted({one for one in addresses if one and addresses.count(one) > 1})
    if not twice:
        return []
    message = (
        f"{place}['LOCATION'] lists the server {twice[0]} more than once: a majority of one "
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
