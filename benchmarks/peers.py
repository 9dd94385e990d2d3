"""Whom we are compared with: how each of them is used, and why so.

Each is used as its own documentation shows it first, with a client of its own, its defaults,
and a lease of 30 s where it knows leases. All make a new handle for each acquire, as a
``with`` statement or a decorator does.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .model import OURS, Role, Unavailable

__all__ = [
    "BARE",
    "COUNTED",
    "DIRECT",
    "KINDS",
    "LEASE",
    "TOKEN",
    "Handle",
    "Kind",
    "Where",
    "kind",
    "maker",
]

LEASE = 30
"""Seconds."""
BARE, TOKEN = "bare", "BLPOP token"
"""The floors' names."""

UNLOCK = """
if redis.call("get", KEYS[1]) == ARGV[1] then
    return redis.call("del", KEYS[1])
end
return 0
"""


@dataclass(frozen=True)
class Where:
    """Which way to the servers: alias of locks, caches and databases, and name of the URL."""

    alias: str
    cache: str
    database: str
    redis_variable: str

    @property
    def redis_url(self) -> str:
        return os.environ[self.redis_variable]


DIRECT = Where("default", "default", "postgres", "BENCH_REDIS_URL")
COUNTED = Where("counted", "counted", "postgres_counted", "BENCH_COUNTED_REDIS_URL")
"""By way of the proxy that counts."""
BRISK = replace(DIRECT, alias="brisk")
BRISK_COUNTED = replace(COUNTED, alias="brisk_counted")
"""With a ``command_timeout`` that allows for shorter leases."""


class Handle(Protocol):
    """What all of them have in common."""

    def acquire(self) -> Any: ...

    def release(self) -> Any: ...


@dataclass(frozen=True)
class Kind:
    """One way to lock.

    Attributes:
        make: Connects, and answers what makes a handle of a name.
        cycle: Acquires and releases a name, where that is not two calls on a handle.
        polls: Its waiters ask again and again, this many seconds apart.
        servers: The process that serves this thread, where that is not the Redis.
    """

    name: str
    role: Role
    options: str
    make: Callable[[Where], Callable[[str], Handle]]
    cycle: Callable[[Where], Callable[[str], None]] | None = None
    polls: float | None = None
    servers: Callable[[], Sequence[int]] = tuple

    def cycling(self, where: Where) -> Callable[[str], None]:
        if self.cycle is not None:
            return self.cycle(where)
        make = self.make(where)

        def cycle(name: str) -> None:
            handle = make(name)
            handle.acquire()
            handle.release()

        return cycle


def _need(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{package} is not installed")


def client(where: Where) -> Any:
    from redis import Redis

    return Redis.from_url(where.redis_url)


# -- ours -----------------------------------------------------------------------------------


def _ours(where: Where) -> Callable[[str], Handle]:
    from django_dlock import Lock

    return lambda name: Lock(name, using=where.alias, wait=None)


# -- floors ---------------------------------------------------------------------------------


def _bare(where: Where) -> Callable[[str], None]:
    execute = client(where).execute_command
    # Made once, as is the packing of its lease: no lock could be cheaper with this client.
    owner = secrets.token_hex(16)
    unlock = execute("SCRIPT LOAD", UNLOCK)
    lease = LEASE * 1000

    def cycle(name: str) -> None:
        execute("SET", name, owner, "NX", "PX", lease)
        execute("EVALSHA", unlock, 1, name, owner)

    return cycle


def _no_handle(where: Where) -> Callable[[str], Handle]:
    raise Unavailable("two commands, no waiting")


class _Token:
    """A token in a list: whoever pops it holds it, and pushes it back."""

    def __init__(self, client: Any, name: str) -> None:
        self._client, self._name = client, name

    def acquire(self) -> None:
        self._client.blpop([self._name], 0)

    def release(self) -> None:
        self._client.rpush(self._name, "token")


def _token(where: Where) -> Callable[[str], Handle]:
    connected = client(where)
    return lambda name: _Token(connected, name)


# -- peers ----------------------------------------------------------------------------------


def _redis_py(where: Where) -> Callable[[str], Handle]:
    connected = client(where)
    return lambda name: connected.lock(name, timeout=LEASE)


def _django_redis(where: Where) -> Callable[[str], Handle]:
    _need("django_redis", "django-redis")
    from django.core.cache import caches

    cache: Any = caches[where.cache]
    return lambda name: cache.lock(name, timeout=LEASE)


def _python_redis_lock(auto_renewal: bool) -> Callable[[Where], Callable[[str], Handle]]:
    def make(where: Where) -> Callable[[str], Handle]:
        _need("redis_lock", "python-redis-lock")
        import redis_lock  # type: ignore[import-untyped]

        connected = client(where)
        return lambda name: redis_lock.Lock(
            connected, name, expire=LEASE, auto_renewal=auto_renewal
        )

    return make


def _pottery(where: Where) -> Callable[[str], Handle]:
    _need("pottery", "pottery")
    from pottery import Redlock

    masters = {client(where)}
    return lambda name: Redlock(key=name, masters=masters, auto_release_time=LEASE)


def _pglock(where: Where) -> Callable[[str], Handle]:
    _need("pglock", "django-pglock")
    from django.conf import settings

    if where.database not in settings.DATABASES:
        raise Unavailable(os.environ.get("BENCH_NO_POSTGRES") or "no PostgreSQL")
    import pglock

    return lambda name: pglock.advisory(name, using=where.database)


def _postgres_session() -> Sequence[int]:
    from django.db import connections

    from tests import postgres

    connection: Any = connections[DIRECT.database].connection
    # Another machine's process ids mean nothing here.
    return (
        () if connection is None or postgres.URL in os.environ else (connection.info.backend_pid,)
    )


KINDS: tuple[Kind, ...] = (
    Kind(
        BARE,
        "floor",
        "redis-py: SET NX PX, then EVALSHA of a compare-and-delete; one owner for all",
        _no_handle,
        cycle=_bare,
    ),
    Kind(TOKEN, "floor", "redis-py: BLPOP without a timeout, RPUSH; no lease", _token),
    Kind(OURS, "ours", "defaults: TTL 30 s, renewed by the watchdog; waits for ever", _ours),
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
        servers=_postgres_session,
    ),
)


def kind(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


@functools.cache
def maker(name: str, where: Where) -> Callable[[str], Handle]:
    """What makes handles of a kind in this process, connected at first use."""
    return kind(name).make(where)


def prime(kind: Kind, name: str) -> None:
    """Make a name ready for its first acquire: a token has to be there."""
    if kind.name == TOKEN:
        with client(DIRECT) as asking:
            asking.rpush(name, "token")
