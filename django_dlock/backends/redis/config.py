"""The settings of the Redis backend, and what is wrong with them; does not import its client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.utils.module_loading import import_string

from ...text.redaction import redacted
from ..base import AliasOptions, BackendOptions, Problem
from ..shared.options import addresses, arguments, both, option, or_none, text, whole

REDIS_CACHES = ("django.core.cache.backends.redis.RedisCache", "django_redis.cache.RedisCache")

SCHEMES = ("redis://", "rediss://", "unix://")
NO_HOST = (
    "names no host; each machine would use a Redis of its own.",
    "Is the variable with the host empty? For the same machine, write redis://localhost:6379/0.",
)
ESCAPES = "If the password contains / ? # or @, write %2F %3F %23 or %40 instead."
NO_PORT = "has a port that is not a number.", f"A URL is redis://host:6379/0. {ESCAPES}"


def cache_entry(alias: str) -> Mapping[str, Any]:
    """The entry of a cache; empty if there is none, or if it is no dict."""
    entry = settings.CACHES.get(alias)
    return entry if isinstance(entry, Mapping) else {}


def is_redis_cache(path: object) -> bool:
    """Whether a cache's ``BACKEND`` is a Redis cache, Django's own or django-redis'."""
    if path in REDIS_CACHES:
        return True
    if not isinstance(path, str):
        return False
    try:
        cache_class = import_string(path)
    except Exception:  # noqa: BLE001 - whatever a module of the project raises
        return False
    bases = getattr(cache_class, "__mro__", ())
    return any(f"{base.__module__}.{base.__qualname__}" in REDIS_CACHES for base in bases)


@dataclass(frozen=True, kw_only=True)
class RedisOptions(BackendOptions):
    """The options of the backend."""

    connects_by = ("CACHE", "LOCATION")
    connection = (
        "CACHE names an alias in CACHES, to connect as that cache does; LOCATION is a URL, which "
        "begins with redis://, rediss:// or unix://."
    )

    connection_kwargs: Mapping[str, Any] = option(
        arguments(), "further arguments for redis-py's connections", {}
    )
    cluster_nodes: tuple[tuple[str, int], ...] = option(
        addresses(), "further nodes of the Redis Cluster in LOCATION", ()
    )
    # One is reserved for urgent calls. With only one other, a signal handler that locks would
    # wait for the thread that it interrupts.
    max_connections: int = option(whole(at_least=3), "the most connections of a process", 32)
    replicas: int = option(
        whole(at_least=0), "how many replicas must confirm a grant or a renewal", 0
    )
    sentinels: tuple[tuple[str, int], ...] | None = option(
        or_none(addresses(at_least=1)), "all Sentinels of the service", None
    )
    service_name: str | None = option(or_none(text()), "the service that the Sentinels watch", None)
    sentinel_kwargs: Mapping[str, Any] = option(
        arguments(), "arguments for the connections to the Sentinels", {}
    )

    def check(self, alias: AliasOptions) -> Iterator[Problem]:
        """E008 for two kinds of servers; E006, unless the entry names exactly one Redis."""
        place, cache, location = f"DLOCKS[{alias.alias!r}]", alias.cache, alias.location
        if self.cluster_nodes and self.sentinels is not None:
            message = both("cluster_nodes", "sentinels", f"{place}['OPTIONS']")
            yield Problem(self.check_id, message, "A cluster has no Sentinels: remove one of them.")
        found: tuple[str, str] | None = None
        if cache is not None:
            found = _wrong_cache(cache, f"{place}['CACHE']")
        elif isinstance(location, tuple):
            found = (
                f"{place}['LOCATION'] is a list, but this backend keeps its locks on one Redis.",
                "Name one URL. OPTIONS names Sentinels, or further nodes of a Redis Cluster.",
            )
        elif wrong := wrong_url(location or "") or self._no_host(location or ""):
            found = f"{place}['LOCATION'] {wrong[0]}", wrong[1]
        if found is not None:
            yield Problem("E006", *found)

    def _no_host(self, url: str) -> tuple[str, str] | None:
        """What is wrong if nothing says which host to connect to; redis-py takes localhost."""
        parts = urlsplit(url)
        # With Sentinels, the backend checks the name of the service.
        named = parts.scheme == "unix" or parts.hostname or self.sentinels is not None
        if named or self.connection_kwargs.get("host") or parse_qs(parts.query).get("host"):
            return None
        return NO_HOST


def _wrong_cache(cache: str, place: str) -> tuple[str, str] | None:
    caches, entry = settings.CACHES, cache_entry(cache)
    if cache not in caches:
        return (
            f"{place} is {redacted(cache)}, which CACHES does not define.",
            f"CACHES defines {sorted(caches)}.",
        )
    if not is_redis_cache(backend := entry.get("BACKEND", "")):
        return (
            f"{place} names CACHES[{cache!r}], which is {redacted(backend)}, not a Redis cache.",
            f"Use one of {list(REDIS_CACHES)} there, or LOCATION here.",
        )
    if not _has_ports(entry.get("LOCATION")):
        # The client's own error would repeat a part of the password.
        return f"CACHES[{cache!r}]['LOCATION'] {NO_PORT[0]}", NO_PORT[1]
    return None


def _has_ports(location: object) -> bool:
    """Whether each port in the URLs of a cache is a number."""
    urls = re.split("[;,]", location) if isinstance(location, str) else location
    return all(map(_has_port, urls)) if isinstance(urls, list | tuple) else True


def _has_port(url: object) -> bool:
    """Whether the port is a number, or left out."""
    try:
        urlsplit(str(url)).port  # noqa: B018
    except ValueError:
        return False
    return True


def wrong_url(url: str) -> tuple[str, str] | None:
    """What is wrong with a URL, and how to correct it; repeats nothing that may be a password."""
    if not url.startswith(SCHEMES):
        begin = "Begin with one of these, as in redis://host:6379/0."
        return f"does not begin with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}.", begin
    if not _has_port(url):
        return NO_PORT
    parts = urlsplit(url)
    # The path of a unix:// URL is that of the socket.
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    if "@" in path:
        return "has a / before its @.", ESCAPES
    named = [path, *parse_qs(parts.query).get("db", [])]
    wrong = next((name for name in named if name and not name.isdecimal()), None)
    if wrong is None:
        return None
    if "@" in parts.query + parts.fragment:
        # The password ends at the last @, so what was taken for a database is a part of it.
        return "has a / before its @.", ESCAPES
    # redis-py would use database 0.
    return (
        f"names the database {redacted(wrong)}, which is not a number.",
        "The path of a redis:// URL is the number of a database, as in redis://host:6379/0.",
    )


def store_problems(
    alias: str, values: Mapping[str, str], refused: str, channels: str
) -> list[Problem]:
    """W003, W006 and W012, from answers of the server.

    Args:
        values: Its answer to ``INFO``; empty if the user may not ask.
        refused: The error if the user may not publish and subscribe; empty if it may.
        channels: The prefix of our channels.
    """
    found: list[Problem] = []
    if not values:
        message = (
            f"The Redis of alias {alias!r} does not let its user run INFO: whether it evicts keys, "
            "and which replicas it has, is not known."
        )
        found.append(Problem("W012", message, "Allow that: ACL SETUSER <user> +info"))
    policy = values.get("maxmemory_policy", "noeviction")
    # Without a limit the memory is never full. Every lock has a TTL, so the "volatile-..." policies
    # evict locks, too.
    if policy != "noeviction" and values.get("maxmemory", "0") != "0":
        message = (
            f"The Redis of alias {alias!r} evicts keys when its memory is full "
            f"(maxmemory-policy is {policy!r}): a held lock may disappear."
        )
        hint = "Set maxmemory-policy noeviction there, or keep the locks on another Redis."
        found.append(Problem("W003", message, hint))
    if refused:
        message = (
            f"The Redis of alias {alias!r} does not let its user publish or subscribe ({refused}): "
            "waiters are not notified of a release and have to ask again and again."
        )
        hint = (
            f"Let it use them: ACL SETUSER <user> &{channels}* +subscribe +publish +pubsub|numsub"
        )
        found.append(Problem("W006", message, hint))
    return found


def replica_problems(alias: str, online: int, needed: int) -> list[Problem]:
    """W011, from the number of replicas that are online."""
    if not needed or online > needed:
        return []
    result = "while one of them is down, no lock can be acquired or renewed"
    if online < needed:
        result = "no lock can be acquired"
    message = (
        f"Each lock of alias {alias!r} has to be confirmed by {needed} replicas of its Redis, "
        f"which has {online}: {result}."
    )
    hint = f"Start one replica more than DLOCKS[{alias!r}]['OPTIONS']['replicas'], or lower that."
    return [Problem("W011", message, hint)]
