"""From settings to a maker of connections: by URL, or as a cache of the project connects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.core.cache.backends.redis import RedisCache
from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ..exceptions import InvalidLockBackend
from .base import AliasOptions

__all__ = ["OPTIONS", "connection_maker"]

OPTIONS = ("connection_kwargs", "sentinel_kwargs", "sentinels", "service_name")
"""Keys of ``OPTIONS`` besides ``command_timeout``."""

_NOT_OURS = (
    # Ours is read in order, reply after command, by redis-py's own parser.
    "parser_class",
    "cache",
    "cache_config",
    # Of the pool whose connections we do not share.
    "max_connections",
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "oss_cluster_maint_notifications_handler",
)


def connection_maker(options: AliasOptions, timeout: float) -> Callable[[], Any]:
    """A function that makes a connection, not yet connected, by the alias's parameters.

    Args:
        timeout: Seconds, of the socket.

    Raises:
        InvalidLockBackend: ``OPTIONS``, the URL or the cache cannot be used.
    """
    place = f"DLOCKS[{options.alias!r}]"
    for key in options.options:
        if key not in OPTIONS:
            raise InvalidLockBackend(
                f"{place}['OPTIONS'] has the unknown key {key!r}; "
                f"known: {['command_timeout', *OPTIONS]}"
            )
    cache = options.cache
    try:
        extra = _mapping(options, "connection_kwargs")
        pool = _location_pool(options) if cache is None else _cache_pool(cache)
    except (ImportError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        source = "CACHE" if cache is not None else "LOCATION"
        raise InvalidLockBackend(
            f"{place}: cannot connect by its {source!r} and 'OPTIONS': {error}"
        ) from error
    connection_class = pool.connection_class
    kwargs = {key: value for key, value in pool.connection_kwargs.items() if key not in _NOT_OURS}
    kwargs.update(extra)
    kwargs.update(
        # Replies as RESP2 gives them: nothing that the server pushes comes in between.
        protocol=2,
        decode_responses=False,
        encoding="utf-8",
        health_check_interval=0,
        # Our commands are repeated here, within the caller's deadline, or not at all.
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        retry_on_error=[],
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
    )

    def make(_keep_alive: ConnectionPool = pool) -> Any:
        # A Sentinel's connection knows its pool by a weak reference only.
        return connection_class(**kwargs)

    return make


def _location_pool(options: AliasOptions) -> ConnectionPool:
    sentinels = options.options.get("sentinels")
    location = options.location or ""
    if sentinels is None:
        return ConnectionPool.from_url(location)
    parsed: dict[str, Any] = dict(parse_url(location))  # type: ignore[no-untyped-call]
    # As django-redis has it: the URL's host is the service, its scheme says whether TLS is on.
    service = options.options.get("service_name") or parsed.get("host")
    if not service:
        raise ValueError("'sentinels' needs 'service_name', or the service as the URL's host")
    for key in ("host", "port", "connection_class"):
        parsed.pop(key, None)
    sentinel_kwargs = {
        "socket_timeout": options.command_timeout,
        **_mapping(options, "sentinel_kwargs"),
    }
    manager = Sentinel(  # type: ignore[no-untyped-call]
        [tuple(pair) for pair in sentinels], sentinel_kwargs=sentinel_kwargs
    )
    tls = location.startswith("rediss://")
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        service, manager, ssl=tls, **parsed
    )


def _cache_pool(alias: str) -> ConnectionPool:
    """The pool by which the cache writes; nothing is connected, changed or shared."""
    from django.core.cache import caches

    cache: Any = caches[alias]
    if isinstance(cache, RedisCache):
        client = cache._cache.get_client(write=True)
    else:
        # django-redis; its client knows replicas, Sentinels and factories of the project.
        client = cache.client.get_client(write=True)
    pool: ConnectionPool = client.connection_pool
    return pool


def _mapping(options: AliasOptions, key: str) -> dict[str, Any]:
    value = options.options.get(key, {})
    if not isinstance(value, Mapping):
        raise TypeError(f"OPTIONS[{key!r}] is {value!r}; it must be a dict")
    return dict(value)
