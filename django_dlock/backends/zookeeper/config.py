"""The settings of ZooKeeper, what is wrong with them, and the client's arguments from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from ...text.redaction import SecretText, redacted
from ..base import AliasOptions, BackendOptions, Problem
from ..shared.options import arguments, duration, option, or_none, text

OWN_ARGUMENTS = ("hosts", "timeout", "client_id", "handler", "logger", "read_only")
"""Arguments of ``KazooClient`` that this backend sets itself."""
LONGEST_SESSION = (2**31 - 1) / 1000
"""Seconds; the protocol has milliseconds in 32 bits. Servers grant much less."""


def shortest_session(alias: AliasOptions) -> float:
    return round(6 * alias.command_timeout, 9)


@dataclass(frozen=True, kw_only=True)
class ZooKeeperOptions(BackendOptions):
    """The options of the backend."""

    connects_by = ("LOCATION",)
    connection = (
        "LOCATION is 'host:2181', or 'host1:2181,host2:2181,host3:2181/chroot'; it is no URL."
    )

    session_timeout: float = option(
        duration(above=True),
        "after how many seconds of silence the servers end the session of a process",
        default_of=lambda alias: max(alias.ttl, shortest_session(alias)),
        check_id="E005",
    )
    credentials: str | None = option(
        or_none(text("'user:password'", "(?s:.*:.*)")), "for digest authentication", None
    )
    client: Mapping[str, Any] = option(arguments(), "further arguments of kazoo's KazooClient", {})

    def check(self, alias: AliasOptions) -> Iterator[Problem]:
        place, shortest = f"DLOCKS[{alias.alias!r}]", shortest_session(alias)
        if (wrong := _wrong_host(_hosts(alias))) is not None:
            message = f"{place}['LOCATION']: {redacted(wrong)} is not a host and port."
            yield Problem("E006", message, self.connection)
        for key in sorted(set(self.client) & set(OWN_ARGUMENTS)):
            message = f"{place}['OPTIONS']['client'] sets {key!r}, which the backend sets itself."
            yield Problem(self.check_id, message, "Set LOCATION and session_timeout instead.")
        if self.session_timeout < shortest:
            message = (
                f"{place}['OPTIONS']['session_timeout'] is {self.session_timeout:g} s, less than "
                f"6 times the command_timeout of {alias.command_timeout:g} s: a lease is good for "
                "half of it, and would not survive one slow answer."
            )
            yield Problem("E007", message, "Raise session_timeout, or lower command_timeout.")

    @property
    def session(self) -> float:
        """Seconds that the server is asked to keep a session from which it hears nothing."""
        return min(self.session_timeout, LONGEST_SESSION)


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


def _hosts(options: AliasOptions) -> str:
    location = options.location or ""
    return location if isinstance(location, str) else ",".join(location)


def client_arguments(options: AliasOptions, own: ZooKeeperOptions) -> dict[str, Any]:
    """The arguments for ``KazooClient``."""
    return {
        "hosts": _hosts(options),
        "timeout": own.session,
        "auth_data": [("digest", SecretText(own.credentials))] if own.credentials else None,
        # For ever: the state of the client says whether there is a connection.
        "connection_retry": {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 0.5},
        **own.client,
    }


def root_of(options: AliasOptions) -> str:
    """The path below which the alias keeps its nodes."""
    # ZooKeeper takes neither "/" nor ".", nor some other characters, as the name of a node.
    return "/" + quote(options.key_prefix, safe="").replace(".", "%2E")
