"""From settings to makers of connections: by URL, or as a cache of the project connects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.core.cache.backends.redis import RedisCache
from redis import ConnectionPool
from redis import asyncio as redis_asyncio
from redis import connection as threaded
from redis import sentinel as threaded_sentinel
from redis.asyncio import sentinel as asyncio_sentinel
from redis.asyncio.retry import Retry as AsyncioRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ..exceptions import InvalidLockBackend
from .base import AliasOptions
from .redis_talk import CLIENTS

__all__ = ["OPTIONS", "LoopMaker", "Makers", "connection_makers"]

OPTIONS = (
    "client",
    "connection_kwargs",
    "max_connections",
    "sentinel_kwargs",
    "sentinels",
    "service_name",
    "spin",
)
"""Keys of ``OPTIONS`` besides ``command_timeout``."""

MAX_CONNECTIONS = 32
SPIN = 0.0003
"""As long as a server on the same machine takes that must be woken, or serves others first. Much
longer, and it would pay with processor time for servers across a network, too."""
LONGEST_SPIN = 0.01

_NOT_OURS = (
    # Ours are read in order, reply after command.
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
    "orig_host_address",
    "orig_socket_timeout",
    "orig_socket_connect_timeout",
)

_ASYNCIO_TWINS: Mapping[type, type] = {
    threaded.Connection: redis_asyncio.Connection,
    threaded.SSLConnection: redis_asyncio.SSLConnection,
    threaded.UnixDomainSocketConnection: redis_asyncio.UnixDomainSocketConnection,
    threaded_sentinel.SentinelManagedConnection: asyncio_sentinel.SentinelManagedConnection,
    threaded_sentinel.SentinelManagedSSLConnection: (asyncio_sentinel.SentinelManagedSSLConnection),
}
"""What coroutines connect with where threads use the other; a project's own class has no twin."""


@dataclass(frozen=True)
class LoopMaker:
    """Makes the connections of one event loop, not yet connected.

    Attributes:
        sentinels: Whom to ask for the server; their connections are the loop's, too.
    """

    make: Callable[[], Any]
    sentinels: asyncio_sentinel.Sentinel | None = None


@dataclass(frozen=True)
class Makers:
    """By one alias's parameters.

    Attributes:
        for_threads: Makes a connection, not yet connected.
        for_loop: Called once for each event loop; ``None`` where only threads can connect so.
        limit: Connections of threads, and of each event loop, at the most.
        client_kwargs: What the connections are made with, where redis-py's client is to use them.
        spin: Seconds for which a thread looks for a reply before it sleeps until it comes.
    """

    for_threads: Callable[[], Any]
    for_loop: Callable[[], LoopMaker] | None
    limit: int
    client_kwargs: Mapping[str, Any] | None
    spin: float


def connection_makers(options: AliasOptions, timeout: float) -> Makers:
    """What makes connections by the alias's parameters.

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
    limit, client = _max_connections(options, place), _client(options, place)
    spin = _spin(options, place)
    cache = options.cache
    try:
        extra = _mapping(options, "connection_kwargs")
        pool = _location_pool(options, timeout) if cache is None else _cache_pool(cache, timeout)
        kwargs = _ours(pool.connection_kwargs)
        # Replies as RESP2 gives them: nothing that the server pushes comes in between.
        kwargs.update(_ours(extra), protocol=2, decode_responses=False, encoding="utf-8")
        kwargs.update(_bounded(timeout))

        def make() -> Any:
            # The pool is kept by this very line: a Sentinel's connection knows it by a weak
            # reference only.
            return pool.connection_class(**kwargs)

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
    if client == "redis-py":
        # Its client for coroutines is another, which nothing that patches this one sees.
        return Makers(make, None, limit, kwargs, spin)
    return Makers(make, _loop_maker(pool, kwargs), limit, None, spin)


def _max_connections(options: AliasOptions, place: str) -> int:
    limit = options.options.get("max_connections", MAX_CONNECTIONS)
    # With one alone, a signal handler that locks could wait for the thread it interrupts.
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 2:
        raise InvalidLockBackend(
            f"{place}['OPTIONS']['max_connections'] is {limit!r}; it takes an int of at least 2"
        )
    return limit


def _client(options: AliasOptions, place: str) -> str:
    client = options.options.get("client", CLIENTS[0])
    if client not in CLIENTS:
        raise InvalidLockBackend(
            f"{place}['OPTIONS']['client'] is {client!r}; it takes one of {list(CLIENTS)}"
        )
    return str(client)


def _spin(options: AliasOptions, place: str) -> float:
    spin = options.options.get("spin", SPIN)
    if not isinstance(spin, int | float) or isinstance(spin, bool) or not 0 <= spin <= LONGEST_SPIN:
        raise InvalidLockBackend(
            f"{place}['OPTIONS']['spin'] is {spin!r}; it takes seconds from 0, for never, "
            f"to {LONGEST_SPIN}"
        )
    return float(spin)


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


def _loop_maker(pool: ConnectionPool, kwargs: Mapping[str, Any]) -> Callable[[], LoopMaker] | None:
    """The same for coroutines, or ``None`` where that is not the same."""
    twin = _ASYNCIO_TWINS.get(pool.connection_class)
    # The latter is a function of the project that is handed a connection of threads.
    if twin is None or kwargs.get("redis_connect_func") is not None:
        return None
    timeout = kwargs["socket_timeout"]
    own = {**kwargs, **_bounded_by_caller(timeout)}
    if not isinstance(pool, SentinelConnectionPool):
        maker = LoopMaker(lambda: twin(**own))
        try:
            maker.make()
        except (RedisError, TypeError, ValueError):
            # A keyword that only the class for threads knows.
            return None
        return lambda: maker

    manager = pool.sentinel_manager
    places = _sentinel_places(manager)
    sentinel_kwargs = {**_ours(manager.sentinel_kwargs), **_bounded_by_caller(timeout)}
    service, is_master = pool.service_name, pool.is_master

    def for_loop() -> LoopMaker:
        sentinels: Any = asyncio_sentinel.Sentinel(  # type: ignore[no-untyped-call]
            places, sentinel_kwargs=sentinel_kwargs
        )
        master = asyncio_sentinel.SentinelConnectionPool(  # type: ignore[no-untyped-call]
            service, sentinels, connection_class=twin, is_master=is_master
        )

        def make() -> Any:
            # Which keeps the pool, as above.
            return twin(**{**own, "connection_pool": master})

        return LoopMaker(make, sentinels)

    return for_loop


def _bounded_by_caller(timeout: float) -> dict[str, Any]:
    """As ``_bounded``, for coroutines, whose caller has one clock over all of it.

    With a timeout of its own, a connection would start a task for every command.
    """
    return {
        **_bounded(timeout),
        "retry": AsyncioRetry(NoBackoff(), 0),
        "socket_timeout": None,
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


def _mapping(options: AliasOptions, key: str) -> dict[str, Any]:
    value = options.options.get(key, {})
    if not isinstance(value, Mapping):
        raise TypeError(f"OPTIONS[{key!r}] is {value!r}; it must be a dict")
    return dict(value)
