"""Holds many leases and renews them; runs in a separate process."""

from __future__ import annotations

import gc
import math
import os
import resource
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import catalogue, peers
from .database_peers import connect
from .model import OURS
from .peers import DIRECT, STORES, ZOOKEEPER, Route
from .store_peers import nodes

SCRIPT, UPDATE = "one script per 500", "one statement per 500"
NODE_SCRIPTS = "one script per 500 on each node"
"""The floors: so many leases cannot be renewed with fewer calls."""
BATCH = 500
RENEW = """
local outcomes, ttl = {}, ARGV[#ARGV]
for i, key in ipairs(KEYS) do
    outcomes[i] = redis.call("get", key) == ARGV[i] and redis.call("pexpire", key, ttl) or 0
end
return outcomes
"""


EXTEND = """
UPDATE kept_lease l SET ends_at = clock_timestamp() + %s * interval '1 second'
FROM unnest(%s::text[], %s::text[]) AS r (name, owner)
WHERE l.name = r.name AND l.owner = r.owner AND l.ends_at > clock_timestamp() RETURNING l.name
"""


class Keeper(ABC):
    """Holds ``names`` with a TTL of ``ttl`` seconds, connected by ``route``."""

    def __init__(self, route: Route, names: Sequence[str], ttl: float) -> None:
        self._route, self._names, self._ttl = route, names, ttl
        self._prefix = names[0].rpartition(":")[0]
        self._client = peers.client(route)

    @abstractmethod
    def hold(self) -> None:
        """Acquire all of them."""

    @abstractmethod
    def renewed(self) -> float:
        """How often all have been renewed so far; a fraction if only some have."""

    @abstractmethod
    def left(self) -> int:
        """How many are still held, according to the server."""

    def _existing(self, keys: Sequence[str]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return sum(pipeline.execute())


class _Ours(Keeper):
    _locks: Sequence[Any] = ()

    def hold(self) -> None:
        from django_dlock import Lock

        alias = self._route.alias
        self._locks = [Lock(name, using=alias, ttl=self._ttl) for name in self._names]
        for lock in self._locks:
            lock.acquire()

    def renewed(self) -> float:
        from django_dlock import locks

        if self._route.store == ZOOKEEPER:
            # It counts no renewals: a renewal only checks that the session is alive.
            return self._extended()
        sample = self._names[:: -(-len(self._names) // 10)]
        # Not through a counting proxy.
        backend = locks[replace(self._route, name=DIRECT.name).alias]
        infos = [backend.get(name) for name in sample]
        return sum(info.renewals for info in infos if info is not None) / len(sample)

    def _extended(self) -> float:
        """By how many intervals the local deadlines have moved."""
        ends = [time.monotonic() + (lock.remaining or 0.0) for lock in self._locks[::100]]
        if not ends:
            return 0.0
        self._first = getattr(self, "_first", ends)
        moved = [end - first for end, first in zip(ends, self._first, strict=True)]
        return sum(moved) / len(moved) / (self._ttl / 3)

    def left(self) -> int:
        from django_dlock import locks

        # Both must agree.
        held = sum(lock.held for lock in self._locks)
        backend = locks[self._route.alias]
        if "listing" not in backend.capabilities:
            return held if all(backend.get(name) for name in self._names[::100]) else 0
        return min(held, backend.count(prefix=self._prefix))


class _Script(Keeper):
    _times = 0

    def hold(self) -> None:
        self._owners = [f"{number:032x}" for number in range(len(self._names))]
        self._acquire()
        threading.Thread(target=self._renew, daemon=True).start()

    def _acquire(self) -> None:
        self._px = int(self._ttl * 1000)
        pipeline = self._client.pipeline(transaction=False)
        for name, owner in zip(self._names, self._owners, strict=True):
            pipeline.set(name, owner, nx=True, px=self._px)
        pipeline.execute()
        self._sha = self._client.script_load(RENEW)

    def _renew(self) -> None:
        due = time.monotonic()
        while True:
            due += self._ttl / 3
            time.sleep(max(0.0, due - time.monotonic()))
            for start in range(0, len(self._names), BATCH):
                batch = slice(start, start + BATCH)
                self._extend(self._names[batch], self._owners[batch])
            self._times += 1

    def _extend(self, names: Sequence[str], owners: Sequence[str]) -> None:
        self._client.evalsha(self._sha, len(names), *names, *owners, self._px)

    def renewed(self) -> float:
        return self._times

    def left(self) -> int:
        return self._existing(self._names)


class _NodeScripts(_Script):
    def _acquire(self) -> None:
        self._nodes = nodes(self._route)
        for node in self._nodes:
            self._client = node
            super()._acquire()

    def _extend(self, names: Sequence[str], owners: Sequence[str]) -> None:
        for node in self._nodes:
            self._client = node
            super()._extend(names, owners)


class _Update(_Script):
    def _acquire(self) -> None:
        execute = self._execute = connect(self._route, prepare_threshold=None).cursor().execute
        execute("DROP TABLE IF EXISTS kept_lease")
        execute(
            "CREATE TABLE kept_lease AS SELECT name, owner, now() + %s * interval '1 second' "
            "AS ends_at FROM unnest(%s::text[], %s::text[]) AS r (name, owner)",
            (self._ttl, self._names, self._owners),
        )
        execute("ALTER TABLE kept_lease ADD PRIMARY KEY (name)")

    def _extend(self, names: Sequence[str], owners: Sequence[str]) -> None:
        self._execute(EXTEND, (self._ttl, list(names), list(owners)))

    def left(self) -> int:
        asking = connect(DIRECT).cursor()
        asking.execute("SELECT count(*) FROM kept_lease WHERE ends_at > now()")
        return int(asking.fetchone()[0])


class _PythonRedisLock(Keeper):
    def hold(self) -> None:
        import redis_lock  # type: ignore[import-untyped]

        # Without this, each thread that dies logs to standard error, and there are thousands.
        threading.excepthook = lambda _: None
        self._locks = []
        for name in self._names:
            lock = redis_lock.Lock(
                self._client, name, expire=math.ceil(self._ttl), auto_renewal=True
            )
            lock.acquire()
            self._locks.append(lock)

    def renewed(self) -> float:
        with peers.client(DIRECT) as asking:
            stats = asking.info("commandstats")
        return float(stats.get("cmdstat_evalsha", {}).get("calls", 0) / len(self._names))

    def left(self) -> int:
        # Not with its own client, because its threads may use all of that client's connections.
        self._client = peers.client(self._route)
        return self._existing([f"lock:{name}" for name in self._names])


class _Sessions(Keeper):
    """django-pglock: one session's locks; nothing to renew."""

    def hold(self) -> None:
        make = catalogue.maker("django-pglock", self._route)
        self._locks = [make(name) for name in self._names]
        for lock in self._locks:
            lock.acquire()

    def renewed(self) -> float:
        return 0.0

    def left(self) -> int:
        from django.db import connections

        with connections[self._route.database].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
            return int(cursor.fetchone()[0])


KEEPERS: dict[str, type[Keeper]] = {
    OURS: _Ours,
    SCRIPT: _Script,
    NODE_SCRIPTS: _NodeScripts,
    UPDATE: _Update,
    "python-redis-lock, renewing": _PythonRedisLock,
    "django-pglock": _Sessions,
}

_keeper: Any = None


def hold(subject: str, route: Route, count: int, ttl: float) -> float:
    """Acquire ``count`` leases; return by how many MiB the process has grown, and the handles."""
    global _keeper
    # Those of an earlier process may live on in a store that is not emptied meanwhile.
    own = f"keep:{os.getpid()}" if route.store in STORES else "keep"
    _keeper = KEEPERS[subject](route, [f"{own}:{number}" for number in range(count)], ttl)
    # By now it is connected, and everything made at first use exists.
    _keeper.renewed()
    before = _resident()
    _keeper.hold()
    gc.collect()
    return _resident() - before


def renewed() -> float:
    """See ``Keeper.renewed``."""
    return float(_keeper.renewed())


def watch(seconds: float) -> tuple[float, float]:
    """How often all leases were renewed, and the seconds of processor time used."""
    renewed, cpu = _keeper.renewed(), time.process_time()
    time.sleep(seconds)
    cpu = time.process_time() - cpu
    return _keeper.renewed() - renewed, cpu


def state(count: int) -> tuple[int, int]:
    """Threads besides the main one, and how many leases are lost."""
    return threading.active_count() - 1, count - _keeper.left()


def _resident() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        # This is the peak, which equals the present size of a process that only grows.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return pages * resource.getpagesize() / (1 << 20)
