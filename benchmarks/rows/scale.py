"""The cost of each operation among more and more held locks, and the size of a held lock."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from testproject.servers import RedisServer

from .. import processor
from ..model import Metric, Readings, Role, Row, Session, Subject

if TYPE_CHECKING:
    from django_dlock.backends.base import BaseLockBackend
    from django_dlock.backends.redis import RedisBackend

    from ..bench import Bench

BASIS, LARGE = 100, 100_000
SIZES = (10, BASIS, 1_000, 10_000, LARGE)
FOREIGN = 1_000_000
"""Keys of other programs in the Redis with the most locks."""
PAGE = 50
"""Page size as in the admin."""
FRESH = 500
"""Locks acquired, renewed in one call and released in each round, besides the held ones."""
NEEDLES = ("lock:99", "7", "no such lock", "lock:")
"""Search texts: found sometimes, often, never, always."""

FILL = """
for number = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call('SET', 'session:' .. number, 'of somebody else')
end
"""


def among(size: int) -> str:
    """The name of a subject."""
    foreign = f" and {FOREIGN:,} other keys" if size == LARGE else ""
    return f"among {size:,}{foreign}".replace(",", " ")


_FLOOR = among(BASIS)

OPERATIONS = {
    "first_page": "first page by age",
    "search": "search",
    "other_order": "page in another order",
    "count": "count",
    "get": "get",
    "acquire": "acquire",
    "renew": f"renew {FRESH} in a call",
    "release": "release",
    "break": "break",
}
"""Metric and title of each."""

METRICS = (
    *(Metric(name, "s", floor=_FLOOR) for name in OPERATIONS),
    # Processor time of this process and of the server.
    *(Metric(f"{name}_cpu", "s", floor=_FLOOR) for name in OPERATIONS),
    # The longest time for which a listing kept the server from serving others.
    Metric("longest_stop", "s"),
    # Bytes of the server's memory for each held lock.
    Metric("memory", "B"),
)


def rows(bench: Bench) -> Iterable[Row]:
    servers: dict[int, _Held] = {}

    def subject(size: int) -> Subject:
        @contextmanager
        def ready() -> Iterator[Session]:
            with RedisServer() as server:
                held = servers[size] = _Held(bench, server, size)
                if size == LARGE:
                    held.add_foreign(FOREIGN)
                with held.connected():
                    yield held

        role: Role = "floor" if size == BASIS else "ours"
        return Subject(among(size), role, "held by four processes, in a Redis of their own", ready)

    @contextmanager
    def scanning() -> Iterator[Session]:
        yield _Scan(servers[LARGE].server)

    scan = Subject(
        "SCAN",
        "peer",
        "SCAN MATCH COUNT 1000 over the Redis with the other keys, as libraries without an index "
        "find their locks; names only",
        scanning,
    )
    yield Row(
        "scale",
        "Operations among locks that others hold",
        METRICS,
        (*map(subject, SIZES), scan),
        rounds=7,
        seconds=55,
    )


def hold(number: int, of: int, url: str, size: int) -> None:
    """Let this worker process hold its share of the locks."""
    backend = _backend(url)
    for index in range(number, size, of):
        backend.acquire(request_for(f"lock:{index}"), deadline=backend.call_deadline())
    backend.close()


def _backend(url: str) -> RedisBackend:
    from django_dlock.backends.base import AliasOptions
    from django_dlock.backends.redis import RedisBackend

    # A search of everything may take longer than the default for a command.
    return RedisBackend(
        AliasOptions(alias="scale", backend="redis", location=url, command_timeout=10)
    )


def request_for(name: str) -> Any:
    from django_dlock.lease import LeaseRequest

    return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=3600.0)


def _client(url: str) -> Any:
    from redis import Redis

    return Redis.from_url(url, socket_timeout=None)


class _Clocked(Session):
    """Measures the cost of operations; ``server_spent``: see ``Bench``."""

    def __init__(self, server_spent: Callable[[], float]) -> None:
        self._server_spent = server_spent

    def _cost(self, name: str, operation: Callable[[], Any], times: int = 1) -> dict[str, float]:
        """The readings of the metric and of its processor time, per operation."""
        spent, began = self._spent(), perf_counter()
        for _ in range(times):
            operation()
        seconds = perf_counter() - began
        return {name: seconds / times, f"{name}_cpu": (self._spent() - spent) / times}

    def _usual_cost(self, name: str, operation: Callable[[], Any]) -> dict[str, float]:
        """The median of three, because the slowest round counts for these."""
        three = [self._cost(name, operation) for _ in range(3)]
        return {metric: median(cost[metric] for cost in three) for metric in three[0]}

    def _spent(self) -> float:
        return process_time() + self._server_spent()


class Among(_Clocked):
    """Measures among this number of held locks."""

    def __init__(self, server_spent: Callable[[], float], backend: BaseLockBackend, size: int):
        from django_dlock.lease import SORT_KEYS

        super().__init__(server_spent)
        self._backend, self._size = backend, size
        self._numbers = itertools.count()
        self._needles = itertools.cycle(NEEDLES)
        self._orders = itertools.cycle(sorted({*SORT_KEYS} - {"age", "token", "alias"}))

    def round(self) -> Readings:
        page, backend = self._page, self._backend
        name = f"lock:{next(self._numbers) % self._size}"
        return {
            **self._cost("first_page", page, 5),
            **self._usual_cost("search", partial(page, contains=next(self._needles))),
            **self._usual_cost("other_order", partial(page, sort=(next(self._orders),))),
            **self._cost("count", backend.count, 20),
            **self._cost("get", lambda: backend.get(name), 50),
            **self._cycle(),
        }

    def _cycle(self) -> dict[str, float]:
        from django_dlock.lease import Renewal

        backend, number = self._backend, next(self._numbers)
        held = [request_for(f"fresh:{number}:{index}") for index in range(FRESH)]
        renewals = [Renewal(request.name, request.owner, request.ttl) for request in held]
        requests, ended = iter(held), iter(held)

        def acquire() -> None:
            backend.acquire(next(requests), deadline=backend.call_deadline())

        def renew() -> None:
            backend.renew(renewals, process="scale", deadline=backend.call_deadline())

        def release() -> None:
            request = next(ended)
            backend.release(
                request.name, request.owner, min_hold=0.0, deadline=backend.call_deadline()
            )

        def break_() -> None:
            request = next(ended)
            backend.break_silently(request.name, owner=request.owner)

        broken = FRESH // 10
        return {
            **self._cost("acquire", acquire, FRESH),
            **self._cost("renew", renew, 3),
            **self._cost("break", break_, broken),
            **self._cost("release", release, FRESH - broken),
        }

    def _page(self, **query: Any) -> None:
        from django_dlock.lease import LeaseQuery

        self._backend.page(LeaseQuery(**query), limit=PAGE)


class _Held(Among):
    """A Redis with this number of held locks."""

    def __init__(self, bench: Bench, server: RedisServer, size: int) -> None:
        super().__init__(lambda: processor.used(server.pid), _backend(server.url), size)
        self.server, self._client = server, _client(server.url)
        before = self._used()
        workers = 4
        bench.workers.run(workers, "benchmarks.rows.scale:hold", workers, server.url, size)
        self._bytes = (self._used() - before) / size

    @contextmanager
    def connected(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._backend.close()
            self._client.close()

    def add_foreign(self, count: int) -> None:
        stride = 100_000
        for first in range(0, count, stride):
            self._client.eval(FILL, 0, first, min(count, first + stride) - 1)

    def _used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def once(self) -> Readings:
        readings = {"longest_stop": self._longest_stop()}
        # In a Redis with few locks, the growth of Redis itself exceeds theirs.
        return {**readings, "memory": self._bytes} if self._size >= 1000 else readings

    def _longest_stop(self) -> float:
        """The longest of all our commands that list locks."""
        from django_dlock.lease import SORT_KEYS

        self._page()
        self._client.config_set("slowlog-log-slower-than", 50)
        self._client.slowlog_reset()
        for needle in NEEDLES:
            self._page(contains=needle)
        for key in SORT_KEYS:
            self._page(sort=(key,))
        slow = self._client.slowlog_get(128)
        self._client.config_set("slowlog-log-slower-than", 10_000)
        return max((entry["duration"] for entry in slow), default=0) / 1e6


class _Scan(_Clocked):
    """Finds all locks by their keys."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(lambda: processor.used(server.pid))
        self._client = _client(server.url)

    def round(self) -> Readings:
        def scan() -> None:
            names = self._client.scan_iter(match="*:l:lock:*", count=1000)
            sum(1 for _ in names)

        return self._cost("first_page", scan)
