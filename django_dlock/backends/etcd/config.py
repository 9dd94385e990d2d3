"""The settings of the etcd backend, and what is wrong with them; without connecting."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ...exceptions import InvalidLockBackend
from ..base import AliasOptions, BackendOptions, Fact, Problem
from ..shared.options import option, or_none, text

DEFAULT_PORT = 2379


class Member(NamedTuple):
    """One member of the cluster, as ``LOCATION`` names it."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class EtcdOptions(BackendOptions):
    """The options of the backend."""

    connects_by = ("LOCATION",)
    connection = "LOCATION has the URL of each member, as in 'https://etcd-1:2379'."

    username: str | None = option(
        or_none(text()), "the user that it authenticates as", None, needs="password"
    )
    password: str | None = option(or_none(text()), "that user's", None, needs="username")
    ca_cert: str | None = option(
        or_none(text()), "the path of a file with the certificate authorities to trust", None
    )
    client_cert: str | None = option(or_none(text()), "the path of the certificate to show", None)
    client_key: str | None = option(
        or_none(text()), "the path of that certificate's key", None, needs="client_cert"
    )

    def check(self, alias: AliasOptions) -> Iterator[Problem]:
        place, urls = f"DLOCKS[{alias.alias!r}]", _urls(alias)
        if len({url.partition(":")[0] for url in urls} & {"http", "https"}) > 1:
            message = f"{place}['LOCATION'] mixes http:// and https://."
            yield Problem("E006", message, "Use https:// for all members.")
        for what, hint in filter(None, map(_wrong_url, urls)):
            # The URL may contain a password, so the message does not repeat it.
            yield Problem("E006", f"{place}['LOCATION'] has {what}.", hint)
        tls = [key for key in ("ca_cert", "client_cert") if getattr(self, key) is not None]
        if tls and any(url.startswith("http://") for url in urls):
            # Otherwise a forgotten "s" would send the password in the clear.
            message = f"{place}['OPTIONS'] has {tls}, but a URL in LOCATION is http://."
            yield Problem(self.check_id, message, "Use https:// there.")


def members(options: AliasOptions) -> list[Member]:
    """The members that ``LOCATION`` names; ``EtcdOptions`` has found nothing wrong with it."""
    urls = map(urlsplit, _urls(options))
    return [Member(it.scheme, it.hostname or "", it.port or DEFAULT_PORT) for it in urls]


def _urls(options: AliasOptions) -> tuple[str, ...]:
    location = options.location
    return (location,) if isinstance(location, str) else location or ()


def _wrong_url(url: str) -> tuple[str, str] | None:
    example = EtcdOptions.connection
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        # Such as a port that is not a number.
        right, parts = False, urlsplit("")
    if not right:
        return "a URL that is not http://host:port or https://…", example
    if parts.username or parts.password:
        return "a user in a URL", "Set OPTIONS['username'] and OPTIONS['password'] instead."
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "a URL with something behind its port", example
    return None


def warnings(options: AliasOptions, own: EtcdOptions) -> list[Problem]:
    """W016: the password would go through a network as plain text."""
    if own.password is None:
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


def denied(options: AliasOptions, keys: str, error: Exception) -> Problem:
    """W010, from the answer of etcd that the user may not use our keys."""
    message = f"The etcd of alias {options.alias!r} does not let its user take locks: {error}."
    role = f"etcdctl role grant-permission <role> readwrite {keys} --prefix=true"
    return Problem("W010", message, f"Give a role of the user the rights: {role}")


def tls_context(alias: str, own: EtcdOptions) -> ssl.SSLContext:
    """How to check the members' certificates, and which certificate to show them.

    Raises:
        InvalidLockBackend: A file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=own.ca_cert)
        if own.client_cert is not None:
            context.load_cert_chain(own.client_cert, own.client_key)
    except OSError as error:
        raise InvalidLockBackend(
            f"DLOCKS[{alias!r}]['OPTIONS']: cannot use the files for TLS: {error}"
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
