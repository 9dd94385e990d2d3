"""Checks an alias's settings for ZooKeeper, and makes the client's arguments from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from django.views.decorators.debug import sensitive_variables

from ... import clock
from ...redaction import SecretText, redacted
from ..base import AliasOptions, Problem

__all__ = ["client_arguments", "problems", "root_of", "session_timeout"]

OPTIONS = ("client", "credentials", "session_timeout")
EXAMPLES = "'host:2181', or 'host1:2181,host2:2181,host3:2181/chroot'"
OWN_ARGUMENTS = ("hosts", "timeout", "client_id", "handler", "logger", "read_only")
"""Arguments of ``KazooClient`` that this backend sets itself."""
LONGEST_SESSION = (2**31 - 1) / 1000
"""Seconds; the protocol has milliseconds in 32 bits. Servers grant much less."""


def problems(options: AliasOptions) -> list[Problem]:
    """E006 for the location, E008 for ``OPTIONS``, E005 and E007 for ``session_timeout``."""
    return [*_location_problems(options), *_option_problems(options)]


def _location_problems(options: AliasOptions) -> Iterator[Problem]:
    place = f"DLOCKS[{options.alias!r}]"
    if options.cache is not None:
        message = f"{place} has 'CACHE', but this backend does not connect as a cache does."
        yield Problem("E006", message, "Remove CACHE, and name the servers in LOCATION.")
    if options.location is None:
        message = f"{place} has no 'LOCATION' to say where its ZooKeeper is."
        yield Problem(
            "E006", message, "LOCATION is 'host:2181', or 'host1:2181,host2:2181/chroot'."
        )
    elif (wrong := _wrong_host(_hosts(options))) is not None:
        message = f"{place}['LOCATION']: {redacted(wrong)} is not a host and port."
        yield Problem("E006", message, f"LOCATION is {EXAMPLES}; it is no URL.")


def _wrong_host(hosts: str) -> str | None:
    if "@" in hosts:
        # The comma and the slash may be those of a password.
        return hosts
    for host in hosts.partition("/")[0].split(","):
        try:
            parts = urlsplit(f"//{host}")
            good = bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            good = False
        if not good or host.endswith(":"):
            return host
    # What follows the scheme of a URL would be taken for a chroot.
    return hosts if "//" in hosts else None


def _option_problems(options: AliasOptions) -> Iterator[Problem]:
    given, place = options.options, f"DLOCKS[{options.alias!r}]['OPTIONS']"
    for key in given:
        if key not in OPTIONS:
            message = f"{place} has the unknown key {redacted(key)}."
            known = ["command_timeout", "outage_patience", *OPTIONS]
            yield Problem("E008", message, f"The ZooKeeper backend knows {known}.")
    credentials = given.get("credentials")
    if credentials is not None and not (isinstance(credentials, str) and ":" in credentials):
        message = f"{place}['credentials'] is not a user and a password."
        yield Problem("E008", message, "Set it to 'user:password'.")
    client = given.get("client", {})
    if not isinstance(client, Mapping):
        message = f"{place}['client'] is {redacted(client)}."
        yield Problem("E008", message, "It is a dict of arguments of kazoo's KazooClient.")
    else:
        for key in sorted(set(client) & set(OWN_ARGUMENTS)):
            message = f"{place}['client'] sets {key!r}, which the backend sets itself."
            yield Problem("E008", message, "Use LOCATION for the servers, and session_timeout.")
    seconds = given.get("session_timeout", 1)
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= clock.LONGEST:
        message = f"{place}['session_timeout'] is {redacted(seconds)}."
        hint = f"It is a number of seconds, more than 0 and at most {clock.LONGEST}."
        yield Problem("E005", message, hint)
    elif session_timeout(options) < round(6 * options.command_timeout, 9):
        message = (
            f"{place}['session_timeout'] is {seconds:g} s, less than 6 times the command_timeout "
            f"of {options.command_timeout:g} s: a lease is good for half of it, and would not "
            "survive one slow answer."
        )
        yield Problem("E007", message, "Raise session_timeout, or lower command_timeout.")


def session_timeout(options: AliasOptions) -> float:
    """Seconds that the server is asked to keep a session from which it hears nothing."""
    shortest = 6 * options.command_timeout
    asked = options.options.get("session_timeout", max(options.ttl, shortest))
    return min(float(asked), LONGEST_SESSION)


def _hosts(options: AliasOptions) -> str:
    location = options.location or ""
    return location if isinstance(location, str) else ",".join(location)


@sensitive_variables("credentials")
def client_arguments(options: AliasOptions) -> dict[str, Any]:
    """The arguments for ``KazooClient``."""
    credentials = options.options.get("credentials")
    return {
        "hosts": _hosts(options),
        "timeout": session_timeout(options),
        "auth_data": [("digest", SecretText(credentials))] if credentials else None,
        # For ever: the state of the client says whether there is a connection.
        "connection_retry": {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5},
        **options.options.get("client", {}),
    }


def root_of(options: AliasOptions) -> str:
    """The path below which the alias keeps its nodes."""
    # ZooKeeper takes neither "/" nor ".", nor some other characters, as the name of a node.
    return "/" + quote(options.key_prefix, safe="").replace(".", "%2E")
