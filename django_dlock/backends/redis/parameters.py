"""Makes connections from the settings: from a URL, or as a cache of the project connects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.cache.backends.redis import RedisCache
from django.views.decorators.debug import sensitive_variables
from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ...exceptions import InvalidLockBackend
from ..base import AliasOptions
from .config import RedisOptions
from .route import Route, Service

_UNUSABLE = (ImportError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors that Django, a cache or redis-py raises for settings that it cannot use."""

# With RESP2, the server sends nothing but replies.
_RESP2: dict[str, Any] = {"protocol": 2, "decode_responses": False, "encoding": "utf-8"}

_NOT_OURS = (
    # We read replies ourselves, in the order of the commands.
    "parser_class",
    "cache",
    "cache_config",
    # Deprecated; ``retry`` replaces it.
    "retry_on_timeout",
    # Options of redis-py's pool, which is not used.
    "max_connections",
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "oss_cluster_maint_notifications_handler",
    "orig_host_address",
    "orig_socket_timeout",
    "orig_socket_connect_timeout",
)


@sensitive_variables("kwargs", "pool")
def connection_maker(options: AliasOptions, own: RedisOptions, timeout: float) -> Route:
    """Makes the connections of an alias.

    Args:
        timeout: Of the socket, in seconds.

    Raises:
        InvalidLockBackend: ``OPTIONS``, the URL or the cache cannot be used.
    """
    cache = options.cache
    try:
        if cache is None:
            pool = _location_pool(str(options.location), own, timeout)
        else:
            pool = _cache_pool(cache, timeout)
        kwargs = _ours(pool.connection_kwargs)
        kwargs.update(_ours(own.connection_kwargs), **_RESP2)
        kwargs.update(_bounded(timeout))
        if own.cluster_nodes and "host" not in kwargs:
            raise TypeError("OPTIONS['cluster_nodes'] needs a URL with the host of a node")
        route = Route(pool, kwargs, own.cluster_nodes)
        # Make one, so that wrong arguments raise here and not in the first acquire.
        route()
    except (*_UNUSABLE, RedisError) as error:
        source = "CACHE" if cache is not None else "LOCATION"
        # Without the frames of the client, which an error page would show with the password.
        raise InvalidLockBackend(
            f"DLOCKS[{options.alias!r}]: cannot connect with its {source!r} and 'OPTIONS': {error}"
        ) from error.with_traceback(None)
    return route


def _ours(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in _NOT_OURS}


def _bounded(timeout: float) -> dict[str, Any]:
    """Arguments that turn off redis-py's own retries and checks, and limit its waiting."""
    return {
        "health_check_interval": 0,
        # We repeat commands ourselves, within the caller's deadline.
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
    }


def _location_pool(location: str, own: RedisOptions, timeout: float) -> ConnectionPool:
    try:
        if own.sentinels is None:
            return ConnectionPool.from_url(location)
        parsed: dict[str, Any] = dict(parse_url(location))  # type: ignore[no-untyped-call]
    except ValueError as error:
        # Without the frames of redis-py, in which Django's error pages would show the password.
        raise ValueError(str(error)) from None
    # As in django-redis: the URL's host is the service, and its scheme turns TLS on.
    service = own.service_name or parsed.get("host")
    if not service:
        raise ValueError("'sentinels' needs 'service_name', or the service as the URL's host")
    for key in ("host", "port", "connection_class"):
        parsed.pop(key, None)
    if location.startswith("rediss://"):
        parsed["ssl"] = True
    return _sentinel_pool(
        service,
        own.sentinels,
        {**_ours(own.sentinel_kwargs), **_bounded(timeout)},
        parsed,
    )


def _sentinel_pool(
    service: str, addresses: Any, sentinel_kwargs: dict[str, Any], kwargs: dict[str, Any]
) -> ConnectionPool:
    manager = Sentinel(addresses, sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]
    pools = [sentinel.connection_pool for sentinel in manager.sentinels]
    sentinels = [Route(pool, {**_ours(pool.connection_kwargs), **_RESP2}, ()) for pool in pools]
    asked = Service(service, sentinels)
    return SentinelConnectionPool(service, asked, **kwargs)  # type: ignore[no-untyped-call]


def _cache_pool(alias: str, timeout: float) -> ConnectionPool:
    """The pool with which the cache writes; its settings are read, its connections not used."""
    from django.core.cache import caches

    cache: Any = caches[alias]
    if isinstance(cache, RedisCache):
        client = cache._cache.get_client(write=True)
    else:
        # django-redis; its client knows the project's replicas, Sentinels and factories.
        client = cache.client.get_client(write=True)
    pool: ConnectionPool = client.connection_pool
    if not isinstance(pool, SentinelConnectionPool):
        return pool
    # A new pool, because the cache's own asks a Sentinel that is down ten times.
    manager = pool.sentinel_manager
    kwargs = _ours(pool.connection_kwargs)
    return _sentinel_pool(
        pool.service_name,
        _sentinel_places(manager),
        {**_ours(manager.sentinel_kwargs), **_bounded(timeout)},
        {**kwargs, "connection_class": pool.connection_class},
    )


def _sentinel_places(manager: Sentinel) -> list[tuple[str, int]]:
    places = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    return [(place["host"], place["port"]) for place in places]
