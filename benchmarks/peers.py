"""The libraries that the benchmark compares: how each of them is used, and why.

Each is used as its own documentation shows first, with its own client, its defaults, and a lease
of 30 s if it has leases. All make a new handle for each acquire, as a ``with`` statement or a
decorator does.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from .model import OURS, Role, Unavailable

LEASE = 30
"""Seconds."""
LEASES, PROCESSES = "django_dlock_leaserecord", "django_dlock_processrecord"
"""Our tables."""
REACHED, BARE, TOKEN = "PING", "bare", "BLPOP token"
"""The names of the floors."""
CONFIRMED = "django-dlock, confirmed"
"""Ours, where each waiter asks the store after its hand-over."""

PING = b"*1\r\n$4\r\nPING\r\n"

UNLOCK = """
if redis.call("get", KEYS[1]) == ARGV[1] then
    return redis.call("del", KEYS[1])
end
return 0
"""

REDLOCK, ZOOKEEPER, ETCD, FAILOVER = STORES = ("redlock", "zookeeper", "etcd", "failover")

ROUTES = "BENCH_ROUTES"
"""Environment variable: where each route leads to. It has a Redis URL, a PostgreSQL URL if there is
one, and on some routes the servers of the other stores."""


@dataclass(frozen=True)
class Route:
    """A way to the servers.

    Attributes:
        name: Also the name of its cache in the settings.
        brisk: Uses a lock alias whose ``command_timeout`` allows shorter leases.
        store: Where our leases are: ``redis``, ``postgres``, ``prepared``, ``sqlite``, or one of
            ``STORES``.
    """

    name: str
    brisk: bool = False
    store: str = "redis"

    @property
    def alias(self) -> str:
        store = "" if self.store == "redis" else f"-{self.store}"
        return f"{self.name}{store}{'-brisk' if self.brisk else ''}"

    @property
    def database(self) -> str:
        return f"postgres-{self.name}"

    @property
    def redis_url(self) -> str:
        return str(self.where("redis"))

    def where(self, store: str) -> Any:
        """The URLs or addresses of a store's servers."""
        return json.loads(os.environ[ROUTES])[self.name][store]


DIRECT, COUNTED = Route("default"), Route("counted")
"""Directly to the servers, and through the counting proxies."""
POSTGRES = Route("default", store="postgres")


class Handle(Protocol):
    """What all handles have in common."""

    def acquire(self) -> Any: ...

    def release(self) -> Any: ...


@dataclass(frozen=True)
class Kind:
    """One way to lock.

    Attributes:
        make: Connects, and returns a function that makes the handle of a name.
        cycle: Acquires and releases a name, if that is not two calls on a handle.
        polls: The seconds between two attempts of its waiters, if they poll.
    """

    name: str
    role: Role
    options: str
    make: Callable[[Route], Callable[[str], Handle]]
    cycle: Callable[[Route], Callable[[str], None]] | None = None
    polls: float | None = None

    def cycling(self, route: Route) -> Callable[[str], None]:
        if self.cycle is not None:
            return self.cycle(route)
        make = self.make(route)

        def cycle(name: str) -> None:
            handle = make(name)
            handle.acquire()
            handle.release()

        return cycle


def need(module: str, package: str) -> None:
    """Raises ``Unavailable`` if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{package} is not installed")


def client(route: Route) -> Any:
    from redis import Redis

    return Redis.from_url(route.redis_url)


# -- ours -----------------------------------------------------------------------------------


def _ours(route: Route) -> Callable[[str], Handle]:
    from django.conf import settings

    from django_dlock import Lock

    if route.alias not in settings.DLOCKS:
        raise Unavailable(no_postgres())
    return lambda name: Lock(name, using=route.alias, wait=None)


class _Confirmed:
    """A lock whose waiter finds the MAC of its hand-over wrong, and asks the store."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def acquire(self) -> Any:
        from django_dlock.backends import handover_mac

        real = handover_mac.key_of
        # As in a process with another SECRET_KEY.
        handover_mac.key_of = lambda prefix, name: real(prefix, name)[::-1]  # type: ignore
        try:
            return self._handle.acquire()
        finally:
            handover_mac.key_of = real

    def release(self) -> Any:
        return self._handle.release()


def _ours_confirmed(route: Route) -> Callable[[str], Handle]:
    make = _ours(route)
    # It warns once a minute.
    logging.getLogger("django_dlock").setLevel(logging.ERROR)
    return lambda name: _Confirmed(make(name))


# -- floors ---------------------------------------------------------------------------------


def _ping(route: Route) -> Callable[[str], None]:
    parts = urlsplit(route.redis_url)
    connection = socket.create_connection((parts.hostname, parts.port))

    def ping(_name: str) -> None:
        connection.sendall(PING)
        connection.recv(64)

    return ping


def _bare(route: Route) -> Callable[[str], None]:
    execute = client(route).execute_command
    # Made once, like the packed lease, because no lock could be cheaper with this client.
    owner = secrets.token_hex(16)
    unlock = execute("SCRIPT LOAD", UNLOCK)
    lease = LEASE * 1000

    def cycle(name: str) -> None:
        execute("SET", name, owner, "NX", "PX", lease)
        execute("EVALSHA", unlock, 1, name, owner)

    return cycle


def no_handle(route: Route) -> Callable[[str], Handle]:
    """For a floor that only cycles."""
    raise Unavailable("bare calls, no waiting")


class _Token:
    """A token in a list: the process that pops it holds it, and pushes it back."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name

    def acquire(self) -> None:
        self._client.blpop([self._name], 0)

    def release(self) -> None:
        self._client.rpush(self._name, "token")


def _token(route: Route) -> Callable[[str], Handle]:
    connected = client(route)
    return lambda name: _Token(connected, name)


# -- peers ----------------------------------------------------------------------------------


def _redis_py(route: Route) -> Callable[[str], Handle]:
    connected = client(route)
    return lambda name: connected.lock(name, timeout=LEASE)


def _django_redis(route: Route) -> Callable[[str], Handle]:
    need("django_redis", "django-redis")
    from django.core.cache import caches

    cache: Any = caches[route.name]
    return lambda name: cache.lock(name, timeout=LEASE)


def _python_redis_lock(auto_renewal: bool) -> Callable[[Route], Callable[[str], Handle]]:
    def make(route: Route) -> Callable[[str], Handle]:
        need("redis_lock", "python-redis-lock")
        import redis_lock  # type: ignore[import-untyped]

        connected = client(route)
        return lambda name: redis_lock.Lock(
            connected, name, expire=LEASE, auto_renewal=auto_renewal
        )

    return make


def _pottery(route: Route) -> Callable[[str], Handle]:
    need("pottery", "pottery")
    from pottery import Redlock

    masters = {client(route)}
    return lambda name: Redlock(key=name, masters=masters, auto_release_time=LEASE)


def _pglock(route: Route) -> Callable[[str], Handle]:
    need("pglock", "django-pglock")
    from django.conf import settings

    if route.database not in settings.DATABASES:
        raise Unavailable(no_postgres())
    import pglock

    return lambda name: pglock.advisory(name, using=route.database)


def no_postgres() -> str:
    """Why it is not available."""
    return os.environ.get("BENCH_NO_POSTGRES") or "no PostgreSQL"


KINDS: tuple[Kind, ...] = (
    Kind(REACHED, "floor", "a PING by a bare socket: the round trip", no_handle, cycle=_ping),
    Kind(
        BARE,
        "floor",
        "redis-py: SET NX PX, then EVALSHA of a compare-and-delete; one owner for all",
        no_handle,
        cycle=_bare,
    ),
    Kind(TOKEN, "floor", "redis-py: BLPOP without a timeout, RPUSH; no lease", _token),
    Kind(OURS, "ours", "defaults: TTL 30 s, renewed by the watchdog; waits for ever", _ours),
    Kind(
        CONFIRMED,
        "ours",
        "the same; holder and waiter have different SECRET_KEYs, so each hand-over is confirmed",
        _ours_confirmed,
    ),
    Kind(
        "redis-py Lock",
        "peer",
        "timeout=30; its waiters poll",
        _redis_py,
        polls=0.1,
    ),
    Kind(
        "django-redis",
        "peer",
        "cache.lock(timeout=30), which is redis-py's on the cache's pool; its waiters poll",
        _django_redis,
        polls=0.1,
    ),
    Kind(
        "python-redis-lock",
        "peer",
        "expire=30, not renewed",
        _python_redis_lock(auto_renewal=False),
    ),
    Kind(
        "python-redis-lock, renewing",
        "peer",
        "expire=30, auto_renewal=True: a thread for each lock",
        _python_redis_lock(auto_renewal=True),
    ),
    Kind(
        "pottery Redlock",
        "peer",
        "one master, auto_release_time=30; it has no renewal of its own; its waiters poll",
        _pottery,
        polls=0.2,
    ),
    Kind(
        "django-pglock",
        "peer",
        "pglock.advisory on a connection that stays open, fsync off; a session's lock has no "
        "lease and no renewal",
        _pglock,
    ),
)


# -- coroutines --------------------------------------------------------------------------------


def _ours_awaited(route: Route) -> Callable[[str], Awaitable[None]]:
    from django_dlock import Lock

    async def cycle(name: str) -> None:
        async with Lock(name, using=route.alias, wait=None):
            pass

    return cycle


def _redis_py_awaited(route: Route) -> Callable[[str], Awaitable[None]]:
    from redis.asyncio import Redis

    connected = Redis.from_url(route.redis_url)

    async def cycle(name: str) -> None:
        async with connected.lock(name, timeout=LEASE):
            pass

    return cycle


AWAITED: dict[str, Callable[[Route], Callable[[str], Awaitable[None]]]] = {
    OURS: _ours_awaited,
    "redis-py Lock": _redis_py_awaited,
}
"""Functions that acquire and release a name within a coroutine, by the name of the kind."""
