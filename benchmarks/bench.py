"""What rows stand on: servers of our own and a configured Django, for all processes of a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from testproject.servers import RedisServer

from .counting import Counted, CountingProxy
from .processes import Workers

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PINS", "Bench"]

PINS = hasattr(os, "sched_setaffinity")
"""Whether this system lets a process choose its CPUs."""


class Bench:
    """One run's surroundings; a context manager.

    Child processes find them by the environment: with ``DJANGO_SETTINGS_MODULE`` being
    ``benchmarks.settings`` and ``BENCH_REDIS_URL`` set, ``django.setup()`` is all they need.

    Attributes:
        quick: The rows should make do with a tenth.
        redis: Without persistence, for nobody else; empty at the start of every row.
        redis_proxy, postgres_proxy: What counts before the servers; ``peers.COUNTED`` leads by
            them. There is no PostgreSQL where ``postgres_url`` is empty.
        workers: Processes for holders and waiters.
        directory: For files; removed at the end.
    """

    directory: Path
    redis: RedisServer
    redis_proxy: CountingProxy
    postgres_proxy: CountingProxy | None = None

    def __init__(self, *, quick: bool = False, postgres: bool = True) -> None:
        self.quick = quick
        self.workers = Workers()
        self.postgres_url = ""
        self._wants_postgres = postgres
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.redis = stack.enter_context(RedisServer())
            self.redis_proxy = stack.enter_context(CountingProxy(self.redis.url))
            no_postgres = self._start_postgres(stack) if self._wants_postgres else "not asked for"
            stack.callback(self.workers.close)
            stack.callback(_forget_leases)
            self._stack = stack.pop_all()
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
            "BENCH_DIRECTORY": str(self.directory),
            "BENCH_REDIS_URL": self.redis.url,
            "BENCH_COUNTED_REDIS_URL": self.redis_proxy.url,
            "BENCH_POSTGRES_URL": self.postgres_url,
            "BENCH_COUNTED_POSTGRES_URL": self.postgres_proxy.url if self.postgres_proxy else "",
            "BENCH_NO_POSTGRES": no_postgres,
        }
        import django

        django.setup()
        from django.core.management import call_command

        # A lease that is lost, or a long wait, is written down.
        call_command("migrate", verbosity=0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def size(self, full: int, least: int = 1) -> int:
        """How many of something: a tenth in a quick run."""
        return max(least, full // 10) if self.quick else full

    @contextmanager
    def on_one_cpu(self, *server_pids: int) -> Iterator[None]:
        """Put this thread and the servers on one CPU, where the system lets us.

        Who waits for a server on another CPU pays for waking that CPU, on virtual machines
        often more than for all the rest, and it changes from one second to the next with where
        the scheduler puts the two. On one CPU all pay the same, and less, so that what a
        client does itself weighs the most.
        """
        if not PINS:
            yield
            return
        allowed, pids = os.sched_getaffinity(0), (0, self.redis.pid, *server_pids)
        for pid in pids:
            os.sched_setaffinity(pid, {max(allowed)})
        try:
            yield
        finally:
            for pid in pids:
                os.sched_setaffinity(pid, allowed)

    def clear(self) -> None:
        """Empty the Redis; scripts stay loaded."""
        from redis import Redis

        with Redis.from_url(self.redis.url) as client:
            client.flushall()

    @contextmanager
    def counting(self) -> Iterator[Counted]:
        """What passes the proxies during the block, whichever of them; complete at its end."""
        proxies = [proxy for proxy in (self.redis_proxy, self.postgres_proxy) if proxy]
        counted, before = Counted(), [proxy.total for proxy in proxies]
        yield counted
        for proxy, then in zip(proxies, before, strict=True):
            counted.round_trips += proxy.total.round_trips - then.round_trips
            counted.commands += proxy.total.commands - then.commands

    def _start_postgres(self, stack: ExitStack) -> str:
        """Why there is none; empty where there is."""
        from tests import postgres

        try:
            self.postgres_url = stack.enter_context(postgres.database())
        except postgres.PostgresNotFound as error:
            return str(error)
        self.postgres_proxy = stack.enter_context(CountingProxy(self.postgres_url))
        return ""


def _forget_leases() -> None:
    """While there is a server, so that the end of the process has nothing to give back."""
    from django_dlock.handler import locks
    from django_dlock.watchdog import shutdown

    shutdown()
    locks.reset()
