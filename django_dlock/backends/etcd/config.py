"""Checks an alias's settings for the etcd backend, without connecting."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...exceptions import InvalidLockBackend
from ...redaction import redacted
from ..base import AliasOptions, Fact, Problem

__all__ = [
    "OPTIONS",
    "Member",
    "denied",
    "facts",
    "members",
    "option",
    "problems",
    "tls_context",
    "warnings",
]

OPTIONS = ("ca_cert", "client_cert", "client_key", "password", "username")
"""Keys of ``OPTIONS``, in addition to those that every backend has; each takes a string."""

DEFAULT_PORT = 2379


class Member(NamedTuple):
    """One member of the cluster, as ``LOCATION`` names it."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def members(options: AliasOptions) -> list[Member]:
    """The members that ``LOCATION`` names; ``problems`` has found nothing wrong with it."""
    found = []
    for url in _urls(options):
        parts = urlsplit(url)
        found.append(Member(parts.scheme, parts.hostname or "", parts.port or DEFAULT_PORT))
    return found


def problems(options: AliasOptions) -> list[Problem]:
    """E006 for what is wrong with ``LOCATION``, E008 for ``OPTIONS``."""
    place = f"DLOCKS[{options.alias!r}]"
    found = [Problem("E006", f"{place}{what}", hint) for what, hint in _wrong_location(options)]
    return found + [Problem("E008", f"{place}{what}", hint) for what, hint in _wrong(options)]


def _urls(options: AliasOptions) -> tuple[str, ...]:
    location = options.location
    return (location,) if isinstance(location, str) else location or ()


def _wrong_location(options: AliasOptions) -> Iterator[tuple[str, str]]:
    example = "Name the URL of each member, as in 'https://etcd-1:2379'."
    if options.cache is not None:
        yield "['CACHE'] is set, but locks in etcd use no cache.", "Remove it, and set LOCATION."
    if not _urls(options):
        yield " has no 'LOCATION' to say where its etcd is.", example
    if len({url.partition(":")[0] for url in _urls(options)} & {"http", "https"}) > 1:
        yield "['LOCATION'] mixes http:// and https://.", "Use https:// for all members."
    for url in _urls(options):
        try:
            parts = urlsplit(url)
            right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            # Such as a port that is not a number.
            right, parts = False, urlsplit("")
        # The URL may contain a password, so the message does not repeat it.
        if not right:
            yield "['LOCATION'] has a URL that is not http://host:port or https://…", example
        elif parts.username or parts.password:
            hint = "Set OPTIONS['username'] and OPTIONS['password'] instead."
            yield "['LOCATION'] has a user in a URL.", hint
        elif parts.path.strip("/") or parts.query or parts.fragment:
            yield "['LOCATION'] has a URL with something behind its port.", example


def _wrong(options: AliasOptions) -> Iterator[tuple[str, str]]:
    given = options.options
    for key, value in given.items():
        if key not in OPTIONS:
            known = ["command_timeout", "outage_patience", *OPTIONS]
            yield f"['OPTIONS'] has the unknown key {redacted(key)}.", f"Known: {known}."
        elif not (isinstance(value, str) and value):
            yield f"['OPTIONS'][{key!r}] is not a non-empty string.", "Set it, or remove it."
    for one, other in (("username", "password"), ("client_key", "client_cert")):
        if one in given and other not in given:
            yield f"['OPTIONS'] has {one!r} but no {other!r}.", f"Set {other!r}, too."
    if "password" in given and "username" not in given:
        yield "['OPTIONS'] has 'password' but no 'username'.", "Set 'username', too."
    plain = any(url.startswith("http://") for url in _urls(options))
    tls = [key for key in ("ca_cert", "client_cert") if key in given]
    if plain and tls:
        # Otherwise a forgotten "s" would send the password in the clear.
        yield f"['OPTIONS'] has {tls}, but a URL in LOCATION is http://.", "Use https:// there."


def warnings(options: AliasOptions) -> list[Problem]:
    """W016: the password would go through a network as plain text."""
    if option(options, "password") is None:
        return []
    plain = [str(each) for each in members(options) if each.scheme == "http" and not _is_here(each)]
    if not plain:
        return []
    message = (
        f"The user and password of alias {options.alias!r} are sent to {', '.join(plain)} as plain "
        "text: whoever reads the network can use them, and take or break any lock."
    )
    hint = (
        f"Serve etcd with TLS, and write https:// in DLOCKS[{options.alias!r}]['LOCATION']; "
        "OPTIONS['ca_cert'] names the certificate of an authority of your own."
    )
    return [Problem("W016", message, hint)]


def _is_here(member: Member) -> bool:
    """Whether the member is on this machine, so that nothing goes through a network."""
    try:
        return ipaddress.ip_address(member.host).is_loopback
    except ValueError:
        return member.host == "localhost"


def option(options: AliasOptions, key: str) -> str | None:
    value: str | None = options.options.get(key)
    return value


def denied(options: AliasOptions, keys: str, error: Exception) -> Problem:
    """W010, from the answer of etcd that the user may not use our keys."""
    message = f"The etcd of alias {options.alias!r} does not let its user take locks: {error}."
    role = f"etcdctl role grant-permission <role> readwrite {keys} --prefix=true"
    return Problem("W010", message, f"Give a role of the user the rights: {role}")


def tls_context(options: AliasOptions) -> ssl.SSLContext:
    """How to check the members' certificates, and which certificate to show them.

    Raises:
        InvalidLockBackend: A file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=option(options, "ca_cert"))
        certificate = option(options, "client_cert")
        if certificate is not None:
            context.load_cert_chain(certificate, option(options, "client_key"))
    except OSError as error:
        raise InvalidLockBackend(
            f"DLOCKS[{options.alias!r}]['OPTIONS']: cannot use the files for TLS: {error}"
        ) from error
    return context


def facts(answer: Mapping[str, Any]) -> list[Fact]:
    """What a member reports about itself, from its answer to ``maintenance/status``."""
    member = (answer.get("header") or {}).get("member_id")
    leader = answer.get("leader") or "0"
    role = "the leader" if leader == member else "a follower"
    size = int(answer.get("dbSize") or 0) / 2**20
    found = [
        Fact("server", f"etcd {answer.get('version', '?')}"),
        Fact("leader", f"the member that answered is {role}"),
        Fact("memory", f"{size:.1f} MiB in its database"),
    ]
    if leader == "0":
        hint = "Start its other members: without a majority, no lock is granted."
        found[1] = Fact("leader", "there is none", hint)
    for alarm in answer.get("errors") or ():
        hint = "See 'etcdctl alarm list'; for NOSPACE, compact and defragment, then disarm it."
        found.append(Fact("alarm", str(alarm), hint))
    return found
