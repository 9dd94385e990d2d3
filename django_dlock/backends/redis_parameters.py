"""From settings to a maker of connections: by URL, or as a cache of the project connects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.core.cache.backends.redis import RedisCache
from redis import ConnectionPool
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import RedisError
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
    # Deprecated; ``retry`` says it all.
    "retry_on_timeout",
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
        pool = _location_pool(options, timeout) if cache is None else _cache_pool(cache, timeout)
        connection_class = pool.connection_class
        kwargs = _ours(pool.connection_kwargs)
        # Replies as RESP2 gives them: nothing that the server pushes comes in between.
        kwargs.update(_ours(extra), protocol=2, decode_responses=False, encoding="utf-8")
        kwargs.update(_bounded(timeout))

        def make(_keep_alive: ConnectionPool = pool) -> Any:
            # A Sentinel's connection knows its pool by a weak reference only.
            return connection_class(**kwargs)

        # Never connected: what its class refuses is told here and not by a first acquire.
        make()
    except (
        ImportError,
        LookupError,
        NotImplementedError,
        RedisError,
        TypeError,
        ValueError,
    ) as error:
        source = "CACHE" if cache is not None else "LOCATION"
        raise InvalidLockBackend(
            f"{place}: cannot connect by its {source!r} and 'OPTIONS': {error}"
        ) from error
    return make


def _ours(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in _NOT_OURS}


def _bounded(timeout: float) -> dict[str, Any]:
    """What keeps a connection from doing more than asked, or for longer."""
    return {
        "health_check_interval": 0,
        # Our commands are repeated within the caller's deadline, or not at all.
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
    }


def _location_pool(options: AliasOptions, timeout: float) -> ConnectionPool:
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
    if location.startswith("rediss://"):
        parsed["ssl"] = True
    return _sentinel_pool(
        service,
        [tuple(pair) for pair in sentinels],
        {**_ours(_mapping(options, "sentinel_kwargs")), **_bounded(timeout)},
        parsed,
    )


def _sentinel_pool(
    service: str, addresses: Any, sentinel_kwargs: dict[str, Any], kwargs: dict[str, Any]
) -> ConnectionPool:
    manager = Sentinel(addresses, sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]
    return SentinelConnectionPool(service, manager, **kwargs)  # type: ignore[no-untyped-call]


def _cache_pool(alias: str, timeout: float) -> ConnectionPool:
    """The pool by which the cache writes; nothing is connected, changed or shared."""
    from django.core.cache import caches

    cache: Any = caches[alias]
    if isinstance(cache, RedisCache):
        client = cache._cache.get_client(write=True)
    else:
        # django-redis; its client knows replicas, Sentinels and factories of the project.
        client = cache.client.get_client(write=True)
    pool: ConnectionPool = client.connection_pool
    if not isinstance(pool, SentinelConnectionPool):
        return pool
    # The cache's own would ask a Sentinel that is down ten times over.
    manager = pool.sentinel_manager
    places = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    kwargs = _ours(pool.connection_kwargs)
    return _sentinel_pool(
        pool.service_name,
        [(place["host"], place["port"]) for place in places],
        {**_ours(manager.sentinel_kwargs), **_bounded(timeout)},
        {**kwargs, "connection_class": pool.connection_class},
    )


def _mapping(options: AliasOptions, key: str) -> dict[str, Any]:
    value = options.options.get(key, {})
    if not isinstance(value, Mapping):
        raise TypeError(f"OPTIONS[{key!r}] is {value!r}; it must be a dict")
    return dict(value)
