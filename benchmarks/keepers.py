"""Holds many leases and keeps them renewed; runs in a process of its own."""

from __future__ import annotations

import gc
import math
import resource
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import peers
from .model import OURS
from .peers import BRISK, BRISK_COUNTED, COUNTED, DIRECT, Where

__all__ = ["BATCH", "SCRIPT", "hold", "look", "renewed", "state"]

SCRIPT = "one script per 500"
"""The floor: nobody can renew with fewer calls of that size."""
BATCH = 500
RENEW = """
local fates, ttl = {}, ARGV[#ARGV]
for i, key in ipairs(KEYS) do
    fates[i] = redis.call("get", key) == ARGV[i] and redis.call("pexpire", key, ttl) or 0
end
return fates
"""

PAST_PROXY = {COUNTED.alias: DIRECT.alias, BRISK_COUNTED.alias: BRISK.alias}
"""For questions of the benchmark itself, which do not count."""


class Keeper(ABC):
    """Holds ``names`` with a TTL of ``ttl`` seconds, reached by ``where``."""

    def __init__(self, where: Where, names: Sequence[str], ttl: float) -> None:
        self._where, self._names, self._ttl = where, names, ttl
        self._client = peers.client(where)

    @abstractmethod
    def hold(self) -> None:
        """Acquire all of them."""

    @abstractmethod
    def renewed(self) -> float:
        """How often all of them have been renewed so far; a part where only some have."""

    @abstractmethod
    def left(self) -> int:
        """How many are still held, as the server says."""

    def _existing(self, keys: Sequence[str]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return sum(pipeline.execute())


class _Ours(Keeper):
    def hold(self) -> None:
        from django_dlock import Lock

        alias = self._where.alias
        self._locks = [Lock(name, using=alias, ttl=self._ttl) for name in self._names]
        for lock in self._locks:
            lock.acquire()

    def renewed(self) -> float:
        from django_dlock import locks

        sample = self._names[:: -(-len(self._names) // 10)]
        backend = locks[PAST_PROXY.get(self._where.alias, self._where.alias)]
        infos = [backend.get(name) for name in sample]
        return sum(info.renewals for info in infos if info is not None) / len(sample)

    def left(self) -> int:
        from django_dlock import locks

        # Both must say so.
        held = sum(lock.held for lock in self._locks)
        return min(held, locks[self._where.alias].count(prefix="keep:"))


class _Script(Keeper):
    _times = 0

    def hold(self) -> None:
        self._owners = [f"{number:032x}" for number in range(len(self._names))]
        self._px = int(self._ttl * 1000)
        pipeline = self._client.pipeline(transaction=False)
        for name, owner in zip(self._names, self._owners, strict=True):
            pipeline.set(name, owner, nx=True, px=self._px)
        pipeline.execute()
        self._sha = self._client.script_load(RENEW)
        threading.Thread(target=self._renew, daemon=True).start()

    def _renew(self) -> None:
        due = time.monotonic()
        while True:
            due += self._ttl / 3
            time.sleep(max(0.0, due - time.monotonic()))
            for start in range(0, len(self._names), BATCH):
                keys = self._names[start : start + BATCH]
                owners = self._owners[start : start + BATCH]
                self._client.evalsha(self._sha, len(keys), *keys, *owners, self._px)
            self._times += 1

    def renewed(self) -> float:
        return self._times

    def left(self) -> int:
        return self._existing(self._names)


class _PythonRedisLock(Keeper):
    def hold(self) -> None:
        import redis_lock  # type: ignore[import-untyped]

        # Each thread that dies says so on standard error otherwise, and there are thousands.
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
        # Not by its own client, all of whose connections its threads may have taken.
        self._client = peers.client(self._where)
        return self._existing([f"lock:{name}" for name in self._names])


class _Sessions(Keeper):
    """django-pglock: one session's, nothing to renew."""

    def hold(self) -> None:
        make = peers.maker("django-pglock", self._where)
        self._locks = [make(name) for name in self._names]
        for lock in self._locks:
            lock.acquire()

    def renewed(self) -> float:
        return 0.0

    def left(self) -> int:
        from django.db import connections

        with connections[self._where.database].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
            return int(cursor.fetchone()[0])


KEEPERS: dict[str, type[Keeper]] = {
    OURS: _Ours,
    SCRIPT: _Script,
    "python-redis-lock, renewing": _PythonRedisLock,
    "django-pglock": _Sessions,
}

_keeper: Any = None


def hold(subject: str, where: Where, count: int, ttl: float) -> float:
    """Acquire so many; MiB by which the process has grown, handles included."""
    global _keeper
    _keeper = KEEPERS[subject](where, [f"keep:{number}" for number in range(count)], ttl)
    # Connected, and what is built at first use is there.
    _keeper.renewed()
    before = _resident()
    _keeper.hold()
    gc.collect()
    return _resident() - before


def renewed() -> float:
    """See ``Keeper.renewed``."""
    return float(_keeper.renewed())


def look(seconds: float) -> tuple[float, float]:
    """How often all were renewed meanwhile, and the seconds of processor time it took."""
    renewed, cpu = _keeper.renewed(), time.process_time()
    time.sleep(seconds)
    cpu = time.process_time() - cpu
    return _keeper.renewed() - renewed, cpu


def state(count: int) -> tuple[int, int]:
    """Threads beside the main one, and how many leases are lost."""
    return threading.active_count() - 1, count - _keeper.left()


def _resident() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        # The most it ever was, which is as good for a process that only grows.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return pages * resource.getpagesize() / (1 << 20)
